//! Dates of signed indexes and keys.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const DAY: u64 = 24 * 60 * 60;

/// Parses a date of the form `Sat, 11 Jul 2026 10:16:37 UTC`.
pub fn parse(text: &str) -> Option<SystemTime> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [_, day, month, year, time, "UTC" | "GMT" | "+0000"] = words[..] else { return None };
    let month = (1..).zip(MONTHS).find(|(_, name)| *name == month)?.0;
    let (day, year): (u64, u64) = (day.parse().ok()?, year.parse().ok()?);
    if !(1..=31).contains(&day) || !(1970..=9999).contains(&year) {
        return None;
    }
    let mut time = time.split(':').map(|part| part.parse::<u64>().ok());
    let (hours, minutes, seconds) = (time.next()??, time.next()??, time.next()??);
    if hours > 23 || minutes > 59 || seconds > 60 {
        return None;
    }
    let seconds = days_before(year, month, day) * DAY + hours * 3600 + minutes * 60 + seconds;
    Some(UNIX_EPOCH + Duration::from_secs(seconds))
}

/// Returns a date as `2031-01-19`.
pub fn day(at: SystemTime) -> String {
    let days = at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / DAY);
    let year = (1970..=9999).find(|year| days_before(year + 1, 1, 1) > days).unwrap_or(9999);
    let month = (1..=12).rfind(|month| days_before(year, *month, 1) <= days).unwrap_or(1);
    format!("{year:04}-{month:02}-{:02}", days - days_before(year, month, 1) + 1)
}

/// Returns the number of days from 1970 to a date of the Gregorian calendar.
fn days_before(year: u64, month: u64, day: u64) -> u64 {
    // A year that begins in March has its leap day at the end.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day;
    days - 719_469
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(text: &str) -> Option<u64> {
        parse(text).map(|at| at.duration_since(UNIX_EPOCH).unwrap().as_secs())
    }

    #[test]
    fn dates_of_an_index_are_read() {
        assert_eq!(seconds("Thu, 01 Jan 1970 00:00:00 UTC"), Some(0));
        assert_eq!(seconds("Sat, 11 Jul 2026 10:16:37 UTC"), Some(1_783_764_997));
        assert_eq!(seconds("Thu, 29 Feb 2024 23:59:59 GMT"), Some(1_709_251_199));
        for text in ["", "Sat, 11 Jul 2026", "Sat, 11 Foo 2026 10:16:37 UTC", "Sat, 0 Jul 2026 10:16:37 UTC"]
        {
            assert_eq!(seconds(text), None, "{text}");
        }
        assert_eq!(seconds("Sat, 11 Jul 2026 10:16:37 PST"), None);
    }

    #[test]
    fn days_are_written_as_iso_8601_has_them() {
        for (text, expected) in [
            ("Thu, 01 Jan 1970 00:00:00 UTC", "1970-01-01"),
            ("Thu, 29 Feb 2024 23:59:59 UTC", "2024-02-29"),
            ("Tue, 31 Dec 2030 12:00:00 UTC", "2030-12-31"),
            ("Fri, 01 Mar 2100 00:00:00 UTC", "2100-03-01"),
        ] {
            assert_eq!(day(parse(text).unwrap()), expected);
        }
    }
}
