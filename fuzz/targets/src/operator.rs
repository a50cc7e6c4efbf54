//! What the operator's commands read: the answers of VMs, which may be those of other users, the requests of clients to
//! a VM, and event logs. Nothing of that may reach a terminal's control sequences.

use tally::untrusted;

fn check(text: &str) {
    let control = text.chars().find(|c| c.is_control() && *c != '\n');
    assert_eq!(control, None, "printed: {text:?}");
}

/// Runs the target. The first byte says what the others are.
pub fn run(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    match kind % 4 {
        0 => {
            if let Some(text) = untrusted::answer(bytes) {
                check(&text);
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
