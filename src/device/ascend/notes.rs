//! Diagnostics for the user, e.g. why a fallback is in use.

#![forbid(unsafe_code)]

use parking_lot::Mutex;

/// A list of lines without duplicates.
#[derive(Debug, Default)]
pub(super) struct Diagnostics {
    lines: Mutex<Vec<String>>,
}

impl Diagnostics {
    pub(super) fn add(&self, line: String) {
        let mut lines = self.lines.lock();
        if !lines.contains(&line) {
            lines.push(line);
        }
    }

    pub(super) fn all(&self) -> Vec<String> {
        self.lines.lock().clone()
    }
}
