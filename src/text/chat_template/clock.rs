//! `strftime_now`: calendar dates and the conversion specifiers of C's `strftime`.
//!
//! The time is UTC: a library cannot determine the local time zone without a call into C, and a prompt should not
//! depend on the server's time zone. An unknown specifier is an error; it is not copied as text.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const DAY_S: i64 = 86_400;
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Returns the seconds since 1970 of the system clock; 0 if the clock is set to an earlier time.
pub(super) fn system_unix_s() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Point in time in the Gregorian calendar, UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CivilTime {
    year: i64,
    /// 1 to 12.
    month: usize,
    /// 1 to 31.
    day: i64,
    /// 1 to 366.
    day_of_year: i64,
    /// 0 is Sunday.
    weekday: usize,
    hour: i64,
    minute: i64,
    second: i64,
}

impl CivilTime {
    /// Converts seconds since 1970 to a date.
    pub(super) fn from_unix_s(unix_s: i64) -> Self {
        let (days, seconds) = (unix_s.div_euclid(DAY_S), unix_s.rem_euclid(DAY_S));
        // Howard Hinnant's civil_from_days: years begin in March, so that the leap day comes last.
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_march_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_march_year + 2) / 153;
        let day = day_of_march_year - (153 * march_month + 2) / 5 + 1;
        let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        // 1 March is day 60 or 61 of the year; in a year that begins in March, 1 January is 306 days after 1 March.
        let day_of_year =
            if month > 2 { day_of_march_year + 60 + i64::from(leap) } else { day_of_march_year - 306 + 1 };
        Self {
            year,
            month: usize::try_from(month).unwrap_or(1),
            day,
            day_of_year,
            weekday: usize::try_from((days + 4).rem_euclid(7)).unwrap_or(0),
            hour: seconds / 3_600,
            minute: seconds / 60 % 60,
            second: seconds % 60,
        }
    }

    /// Formats the point in time.
    pub(super) fn format(&self, format: &str) -> Result<String, Error> {
        let mut text = String::new();
        let mut letters = format.chars();
        while let Some(letter) = letters.next() {
            if letter == '%' {
                self.directive(&mut letters, &mut text, format)?;
            } else {
                text.push(letter);
            }
        }
        Ok(text)
    }

    fn directive(&self, letters: &mut std::str::Chars<'_>, text: &mut String, format: &str) -> Result<(), Error> {
        let mut letter = letters.next();
        // The flag `-` ("%-d") suppresses leading zeros.
        let bare = letter == Some('-');
        if bare {
            letter = letters.next();
        }
        let hour12 = (self.hour + 11) % 12 + 1;
        let mut number = |value: i64, width: usize| {
            let width = if bare { 0 } else { width };
            padded(text, value, width, '0');
        };
        match letter {
            Some('Y') => number(self.year, 4),
            Some('y') => number(self.year.rem_euclid(100), 2),
            Some('m') => number(i64::try_from(self.month).unwrap_or_default(), 2),
            Some('d') => number(self.day, 2),
            Some('j') => number(self.day_of_year, 3),
            Some('H') => number(self.hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(self.minute, 2),
            Some('S') => number(self.second, 2),
            Some('e') => padded(text, self.day, 2, ' '),
            Some('B') => text.push_str(MONTHS[self.month - 1]),
            Some('b' | 'h') => text.push_str(&MONTHS[self.month - 1][..3]),
            Some('A') => text.push_str(WEEKDAYS[self.weekday]),
            Some('a') => text.push_str(&WEEKDAYS[self.weekday][..3]),
            Some('p') => text.push_str(if self.hour < 12 { "AM" } else { "PM" }),
            Some('F') => text.push_str(&self.format("%Y-%m-%d")?),
            Some('T') => text.push_str(&self.format("%H:%M:%S")?),
            Some('z') => text.push_str("+0000"),
            Some('Z') => text.push_str("UTC"),
            Some('%') => text.push('%'),
            _ => {
                let detail = format!("strftime_now: unknown directive in {format:?}");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        }
        Ok(())
    }
}

/// Appends a number, padded to at least `width` characters.
fn padded(text: &mut String, value: i64, width: usize, with: char) {
    let digits = value.to_string();
    text.extend(std::iter::repeat_n(with, width.saturating_sub(digits.len())));
    text.push_str(&digits);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn formatted(unix_s: i64, format: &str) -> String {
        CivilTime::from_unix_s(unix_s).format(format).unwrap()
    }

    #[test]
    fn known_moments_are_dated_right() {
        // Expected values from `date -u -d @N`.
        for (unix_s, date) in [
            (0, "Thu 1970-01-01 00:00:00 001"),
            (951_782_400, "Tue 2000-02-29 00:00:00 060"),
            (951_868_800, "Wed 2000-03-01 00:00:00 061"),
            (1_735_689_599, "Tue 2024-12-31 23:59:59 366"),
            (4_107_542_400, "Mon 2100-03-01 00:00:00 060"),
            (-1, "Wed 1969-12-31 23:59:59 365"),
            (1_927_857_906, "Mon 2031-02-03 04:05:06 034"),
        ] {
            assert_eq!(formatted(unix_s, "%a %F %T %j"), date);
        }
        assert_eq!(formatted(1_927_857_906, "%A, %-d %B %y, %I:%M %p 100%%"), "Monday, 3 February 31, 04:05 AM 100%");
        assert_eq!(formatted(0, "%I %p"), "12 AM");
    }

    #[test]
    fn days_follow_each_other_over_four_centuries() {
        let mut before = CivilTime::from_unix_s(-DAY_S);
        for day in 0..146_097 {
            let at = CivilTime::from_unix_s(day * DAY_S);
            assert_eq!(at.weekday, (before.weekday + 1) % 7);
            let next_day = at.day == before.day + 1 && at.month == before.month && at.year == before.year;
            let next_month = at.day == 1 && at.month == before.month % 12 + 1;
            assert!(next_day || next_month, "{before:?} {at:?}");
            assert!(at.day_of_year == before.day_of_year + 1 || (at.day_of_year == 1 && at.month == 1 && at.day == 1));
            before = at;
        }
        assert_eq!((before.year, before.month, before.day), (2369, 12, 31));
    }

    #[test]
    fn an_unknown_letter_is_an_error() {
        assert!(CivilTime::from_unix_s(0).format("%Q").is_err());
        assert!(CivilTime::from_unix_s(0).format("%").is_err());
    }
}
