//! What a user should know of a device and would not see otherwise: why something runs in another way than it could.

#![forbid(unsafe_code)]

use parking_lot::Mutex;

/// Lines, each once.
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
