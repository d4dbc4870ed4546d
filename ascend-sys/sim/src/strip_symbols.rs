//! Copies of the shared library without some functions: their names in the dynamic symbol table are overwritten, so
//! that the system's loader does not find them.

use std::io;
use std::path::Path;

/// Copies a 64-bit little-endian ELF library.
pub(crate) fn copy_without(library: &Path, symbols: &[&str], file: &Path) -> io::Result<()> {
    let mut bytes = std::fs::read(library)?;
    let names = dynamic_names(&bytes).ok_or_else(|| io::Error::other("not a 64-bit ELF library"))?;
    for symbol in symbols {
        let name = [&[0], symbol.as_bytes(), &[0]].concat();
        let table = &mut bytes[names.clone()];
        let at = table.windows(name.len()).position(|window| window == name);
        let at = at.ok_or_else(|| io::Error::other(format!("no symbol {symbol} to leave out")))?;
        table[at + 1] = b'-';
    }
    std::fs::write(file, bytes)
}

/// Range of `.dynstr`, the string table linked to the section of dynamic symbols.
fn dynamic_names(bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    const DYNAMIC_SYMBOLS: u64 = 11;
    const SECTION_BYTES: usize = 64;
    let number = |at: usize, size: usize| {
        let field = bytes.get(at..at + size)?;
        Some(field.iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte)))
    };
    let place = |value: u64| usize::try_from(value).ok();
    if bytes.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let first = place(number(40, 8)?)?;
    let count = place(number(60, 2)?)?;
    let section = |i: usize| first + i * SECTION_BYTES;
    let symbols = (0..count).find(|&i| number(section(i) + 4, 4) == Some(DYNAMIC_SYMBOLS))?;
    let strings = section(place(number(section(symbols) + 40, 4)?)?);
    let start = place(number(strings + 24, 8)?)?;
    let end = start + place(number(strings + 32, 8)?)?;
    bytes.get(start..end).map(|_| start..end)
}
