//! The bytes of one weight file: a read-only memory map, or a buffer for tests and embedded models.
//!
//! This is the only file of `weights` with `unsafe`. It guarantees that the bytes do not move during the lifetime of
//! the value, and that [`FileMap::release`] never changes them. It never writes, and reads only requested pages.
//!
//! A map shows the file as it is *now*: truncating a weight file in place while an engine reads it ends the process
//! with `SIGBUS`, as with every engine that maps weights. Replace such files by renaming.

#![deny(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::WeightError;

/// A file's bytes and the path that errors name.
pub struct FileMap {
    path: PathBuf,
    bytes: Bytes,
}

enum Bytes {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl FileMap {
    /// Maps a file. Nothing of it is read yet.
    pub fn open(path: &Path) -> Result<Self, WeightError> {
        let io = |error| WeightError::Io { path: path.to_owned(), error };
        let file = File::open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() {
            return Err(io(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file")));
        }
        if meta.len() == 0 {
            // Not every system maps nothing.
            return Ok(Self::from_vec(path, Vec::new()));
        }
        #[allow(unsafe_code)]
        // SAFETY: the map is private to this value and read-only, and the slice borrows from the value. No other
        // process may change the file meanwhile; the head of the module states this condition for the host.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
        Ok(Self { path: path.to_owned(), bytes: Bytes::Mapped(map) })
    }

    /// Wraps bytes in memory; `path` is only a name for errors.
    pub fn from_vec(path: impl Into<PathBuf>, bytes: Vec<u8>) -> Self {
        Self { path: path.into(), bytes: Bytes::Owned(bytes) }
    }

    /// The file's path, or the name given to bytes in memory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// Lets the system drop the pages that lie wholly inside the range; a later read loads them from the file again.
    /// Has no effect on bytes in memory, on a range outside the file, and on systems without `madvise`.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = &self.bytes {
            // 64 KiB is the largest page size of the platforms served (aarch64 kernels); a map starts on a page, so
            // multiples of it are page boundaries with every smaller page size, too.
            const PAGE_BYTES: usize = 64 << 10;
            let start = range.start.next_multiple_of(PAGE_BYTES);
            let end = range.end.min(map.len()) / PAGE_BYTES * PAGE_BYTES;
            if start < end {
                #[allow(unsafe_code)]
                // SAFETY: the map is backed by a file and never written, so a dropped page is read back with the same
                // bytes and borrows stay valid. The range lies in the map, on page boundaries.
                let advised =
                    unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
                // This is advice only: a system that refuses keeps the pages until it needs the memory.
                let _ = advised;
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl std::fmt::Debug for FileMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileMap")
            .field("path", &self.path)
            .field("len_bytes", &self.bytes().len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_pages_read_the_same_again() {
        let path = std::env::temp_dir().join(format!("ascend-llm-mmap-{}", std::process::id()));
        let bytes: Vec<u8> = (0..300_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let map = FileMap::open(&path).unwrap();
        assert!(matches!(map.bytes, Bytes::Mapped(_)));
        let before = map.bytes();
        assert_eq!(before, bytes);
        map.release(1..bytes.len());
        map.release(0..usize::MAX);
        map.release(Range { start: 200_000, end: 2 });
        assert_eq!(before, bytes);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn an_empty_file_maps_to_nothing_and_a_folder_is_refused() {
        let path = std::env::temp_dir().join(format!("ascend-llm-empty-{}", std::process::id()));
        std::fs::write(&path, []).unwrap();
        assert!(FileMap::open(&path).unwrap().bytes().is_empty());
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(FileMap::open(&std::env::temp_dir()), Err(WeightError::Io { .. })));
    }
}
