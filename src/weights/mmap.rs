//! Bytes of one weight file: a read-only memory map, or a buffer for tests and embedded models.
//!
//! This is the only file of `weights` with `unsafe` code. It guarantees that the bytes do not move during the lifetime
//! of the value, and that [`FileMap::release`] never changes the bytes that a reader sees. It never writes, and it
//! never reads a page that no caller requests.
//!
//! A map shows the *current* contents of the file: if a process truncates a weight file in place while an engine reads
//! it, the engine's process ends with `SIGBUS`, as with every engine that maps weights. Replace such files by renaming.

#![deny(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::WeightError;

/// Bytes of a file, with the path for errors.
pub struct FileMap {
    path: PathBuf,
    bytes: Bytes,
}

enum Bytes {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl FileMap {
    /// Maps a file without reading it.
    ///
    /// # Errors
    /// [`WeightError::Io`] if the file cannot be opened or mapped, or is not a regular file.
    pub fn open(path: &Path) -> Result<Self, WeightError> {
        let io = |error| WeightError::Io { path: path.to_owned(), error };
        let file = File::open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() {
            return Err(io(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file")));
        }
        if meta.len() == 0 {
            // Not every system can map an empty file.
            return Ok(Self::from_vec(path, Vec::new()));
        }
        #[allow(unsafe_code)]
        // SAFETY: `Mmap::map` requires that the mapped bytes do not change while they are borrowed.
        // - This process does not change them: the map is read-only and private to this value, which hands it out only
        //   as `&[u8]` bound to its own lifetime.
        // - Other processes must not change the file: the module documentation requires this of the host.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
        Ok(Self { path: path.to_owned(), bytes: Bytes::Mapped(map) })
    }

    /// Creates a value from bytes in memory; `path` is only used in errors.
    pub fn from_vec(path: impl Into<PathBuf>, bytes: Vec<u8>) -> Self {
        Self { path: path.into(), bytes: Bytes::Owned(bytes) }
    }

    /// Returns the path of the file, or the name given to bytes in memory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns all bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// Allows the system to release the pages that are completely inside the range; later reads load them from the file
    /// again.
    ///
    /// The call has no effect for bytes in memory, for a range outside the file, and on systems without `madvise`.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = &self.bytes {
            // 64 KiB is the largest page size of the supported platforms (aarch64 kernels). A map starts at a page
            // boundary, so multiples of 64 KiB are page boundaries for every smaller page size, too.
            const PAGE_BYTES: usize = 64 << 10;
            let start = range.start.next_multiple_of(PAGE_BYTES);
            let end = range.end.min(map.len()) / PAGE_BYTES * PAGE_BYTES;
            if start < end {
                #[allow(unsafe_code)]
                // SAFETY: `DontNeed` requires that dropping the pages does not change the bytes that borrows see.
                // - The map is backed by a file and is never written, so a dropped page is loaded from the file
                //   again with the same bytes, and borrows stay valid.
                // - `start..end` is within the map, and both ends are page boundaries.
                let advised =
                    unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
                // The call is only advice: if the system rejects it, the pages stay until the system needs the memory.
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
    fn an_empty_file_maps_to_no_bytes_and_a_folder_is_an_error() {
        let path = std::env::temp_dir().join(format!("ascend-llm-empty-{}", std::process::id()));
        std::fs::write(&path, []).unwrap();
        assert!(FileMap::open(&path).unwrap().bytes().is_empty());
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(FileMap::open(&std::env::temp_dir()), Err(WeightError::Io { .. })));
    }
}
