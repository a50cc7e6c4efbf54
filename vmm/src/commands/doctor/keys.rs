//! The fact about until when Debian's keys in this program verify packages.

use std::time::SystemTime;

use guest_images::{date, packages};

use crate::host::fact::Fact;

pub fn fact(now: SystemTime) -> Fact {
    let (first, last) = packages::keys_expire();
    let (from, to) = (date::day(first), date::day(last));
    let says = if now < last {
        format!("Debian's keys in this program, which verify packages, expire from {from} to {to}")
    } else {
        format!("the last of Debian's keys in this program has expired on {to}: a newer Tally has newer ones")
    };
    Fact::note("keys", says)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn it_is_said_when_the_keys_expire() {
        let now = SystemTime::now();
        let expected =
            "Debian's keys in this program, which verify packages, expire from 2031-01-19 to 2035-03-28";
        assert_eq!(fact(now).says, expected);
        let says = fact(now + Duration::from_hours(20 * 366 * 24)).says;
        assert!(says.contains("has expired on 2035-03-28: a newer Tally"), "{says}");
    }
}
