//! Cursor over untrusted little-endian bytes that never reads out of bounds and never allocates.

#![forbid(unsafe_code)]

/// Reads forward from `at`; every error contains the position and the number of missing bytes.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Returns the next `len` bytes. `len` has the width of the format's lengths, so that no conversion truncates it.
    pub(super) fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], String> {
        let taken = usize::try_from(len).ok().and_then(|len| self.bytes[self.at..].get(..len)).ok_or_else(|| {
            format!("{what} at byte {} needs {len} bytes, but only {} are left", self.at, self.remaining())
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let taken = self.take(N as u64, what)?;
        let mut out = [0; N];
        out.copy_from_slice(taken);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Reads a string and the 64-bit length before it.
    pub(super) fn string(&mut self, what: &str) -> Result<&'a str, String> {
        let len = self.u64(what)?;
        let start = self.at;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map_err(|error| format!("{what} at byte {start} is not UTF-8: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::Reader;

    #[test]
    fn reads_in_bounds_only() {
        let mut reader = Reader::new(&[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, b'h', b'i', 9]);
        assert_eq!(reader.u32("n"), Ok(1));
        assert_eq!(reader.string("s"), Ok("hi"));
        assert_eq!((reader.at(), reader.remaining()), (14, 1));
        assert!(reader.u32("n").unwrap_err().contains("needs 4 bytes, but only 1 are left"));
        assert!(reader.take(u64::MAX, "x").is_err());
        assert_eq!(reader.take(1, "x"), Ok(&[9][..]));
        assert_eq!(reader.take(0, "x"), Ok(&[][..]));
    }
}
