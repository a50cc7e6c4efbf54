//! Stacks of functions, and how often each was sampled. However many there are, at most some tens of MiB are kept.

use std::collections::BTreeMap;

/// Maximum length of a name; the rest is cut.
const MAX_NAME: usize = 512;
/// Maximum size of all distinct stacks, which is enough for some ten thousand.
const MAX_STACKS: usize = 32 << 20;
/// Memory that a frame takes while the picture is drawn, besides its name.
const FRAME_SIZE: usize = 48;

/// Stacks, and how often each was sampled.
#[derive(Debug, Default)]
pub struct Stacks {
    /// Samples by stack: its frames from the outermost to the innermost, separated by semicolons.
    pub counts: BTreeMap<String, u64>,
    /// Number of samples that are not counted: those that are too large, or whose stack found no room.
    pub left_out: u64,
    kept: usize,
}

impl Stacks {
    /// Counts a sample, by the names of its frames from the outermost to the innermost.
    pub fn add(&mut self, frames: &[String]) {
        let stack = frames.join(";");
        let size = stack.len() + frames.len() * FRAME_SIZE;
        if let Some(count) = self.counts.get_mut(&stack) {
            *count += 1;
        } else if self.kept + size > MAX_STACKS {
            self.left_out += 1;
        } else {
            self.kept += size;
            self.counts.insert(stack, 1);
        }
    }

    /// Returns the number of samples that are counted.
    pub fn count(&self) -> u64 {
        self.counts.values().sum()
    }

    /// Says how many samples are left out, if any are.
    pub fn remark(&self) -> Option<String> {
        let (count, left_out) = (self.count(), self.left_out);
        (left_out > 0).then(|| {
            format!(
                "--flamegraph: the picture shows {count} of {} samples: the others are too large, or too different",
                count.saturating_add(left_out)
            )
        })
    }
}

/// Returns a name without the characters that have a meaning in folded stacks.
pub fn name(text: &str) -> String {
    text.chars().map(|c| if c == ';' || c.is_control() { '_' } else { c }).take(MAX_NAME).collect()
}

/// Returns the name of a function of the kernel's, which the palette knows by its end.
pub fn of_kernel(text: &str) -> String {
    name(text) + "_[k]"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ever_new_stacks_are_kept_up_to_a_limit_and_the_rest_is_counted() {
        let mut stacks = Stacks::default();
        let stack = |number: u32| [vec![number.to_string()], vec!["f".to_owned(); 256]].concat();
        for number in 0..5000 {
            stacks.add(&stack(number));
        }
        assert!(stacks.kept <= MAX_STACKS);
        assert!(stacks.counts.len() > 1000, "{}", stacks.counts.len());
        assert!(stacks.left_out > 1000, "{}", stacks.left_out);
        assert_eq!(stacks.count() + stacks.left_out, 5000);
        // A stack that is known already still counts.
        let left_out = stacks.left_out;
        stacks.add(&stack(0));
        assert_eq!((stacks.counts.values().max(), stacks.left_out), (Some(&2), left_out));
    }
}
