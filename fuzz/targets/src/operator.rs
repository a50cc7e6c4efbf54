//! What the operator's commands read: the answers of VMs, which may be those of other users, the requests of clients to
//! a VM, and event logs. Nothing of that may reach a terminal's control sequences, and what is printed is not much more
//! than what was read.

use tally::untrusted;

/// What may be printed for a VM that says nothing: the names and help texts of the metrics, for each of its answers.
const MOST_PRINTED: usize = 16 << 10;
/// What may be printed for each byte that a VM says. A counter's report of some hundred bytes becomes five metrics,
/// each of which has the labels of its VM.
const MOST_FOR_A_BYTE: usize = 64;

fn check(text: &str) {
    let control = text.chars().find(|c| c.is_control() && *c != '\n');
    assert_eq!(control, None, "printed: {text:?}");
}

/// Runs the target. The first byte says what the others are.
pub fn run(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    match kind % 4 {
        0 => {
            if let Some(text) = untrusted::answers(bytes) {
                check(&text);
                let limit = MOST_PRINTED + bytes.len() * MOST_FOR_A_BYTE;
                assert!(text.len() <= limit, "{} bytes printed for {}", text.len(), bytes.len());
            }
        }
        1 => {
            untrusted::is_request(bytes);
        }
        part => {
            let mut out = Vec::new();
            let damage = untrusted::log(bytes, part == 3, &mut out).expect("memory can be written");
            check(&String::from_utf8(out).expect("a log is shown as text"));
            check(&damage.unwrap_or_default());
        }
    }
}
