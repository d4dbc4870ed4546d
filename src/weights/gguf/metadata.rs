//! The key-value store at the head of a GGUF file.
//!
//! Values stay in the file; memory holds one small record per key. Getters widen integers (a writer may choose any
//! width) and never convert between kinds: a number is not a string, an integer is not a float.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::reader::Reader;
use super::value::{Array, Value};
use crate::weights::mmap::FileMap;

/// Bytes of the smallest pair: an empty key, a type, a value of one byte.
const MIN_PAIR_BYTES: u64 = 8 + 4 + 1;

/// The metadata of one file, by key.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: Arc<FileMap>,
    /// In file order.
    pairs: Vec<Pair>,
    /// Indices into `pairs`, sorted by key.
    by_key: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Pair {
    key: Range<usize>,
    /// Byte range of the value, from its type number on.
    value: Range<usize>,
}

impl Metadata {
    /// Reads `count` pairs. Time and memory follow the bytes that are there, not the count.
    pub(super) fn read(file: &Arc<FileMap>, reader: &mut Reader<'_>, count: u64) -> Result<Self, String> {
        if count > reader.remaining() as u64 / MIN_PAIR_BYTES {
            let left = reader.remaining();
            return Err(format!("header announces {count} metadata pairs, but {left} bytes are left"));
        }
        let mut pairs = Vec::with_capacity(usize::try_from(count).unwrap_or_default());
        for _ in 0..count {
            let key = reader.string("metadata key")?;
            let key_range = reader.at() - key.len()..reader.at();
            let start = reader.at();
            Value::read(reader).map_err(|what| format!("metadata key {key:?}: {what}"))?;
            pairs.push(Pair { key: key_range, value: start..reader.at() });
        }
        let mut metadata = Self { file: file.clone(), pairs, by_key: Vec::new() };
        let len = u32::try_from(metadata.pairs.len()).map_err(|_| format!("{count} metadata pairs are too many"))?;
        let mut by_key: Vec<u32> = (0..len).collect();
        by_key.sort_unstable_by_key(|&id| metadata.key(id));
        if let Some(twice) = by_key.windows(2).find(|ids| metadata.key(ids[0]) == metadata.key(ids[1])) {
            return Err(format!("metadata key {:?} is given twice", metadata.key(twice[0])));
        }
        metadata.by_key = by_key;
        Ok(metadata)
    }

    fn key(&self, id: u32) -> &str {
        self.key_of(&self.pairs[id as usize])
    }

    fn key_of(&self, pair: &Pair) -> &str {
        let key = &self.file.bytes()[pair.key.clone()];
        // Checked when the file was opened.
        std::str::from_utf8(key).unwrap_or_default()
    }

    fn value(&self, id: u32) -> Option<Value<'_>> {
        let mut reader = Reader::new(&self.file.bytes()[self.pairs[id as usize].value.clone()]);
        Value::read(&mut reader).ok()
    }

    /// The keys in file order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.pairs.iter().map(|pair| self.key_of(pair))
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Whether the store is empty.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// The value of a key, of any type.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let at = self.by_key.binary_search_by(|&id| self.key(id).cmp(key)).ok()?;
        self.value(self.by_key[at])
    }

    /// `general.architecture`.
    pub fn architecture(&self) -> Option<&str> {
        self.str("general.architecture")
    }

    /// A string.
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::String(value) => Some(value),
            _ => None,
        }
    }

    /// An integer of any width that fits.
    pub fn u32(&self, key: &str) -> Option<u32> {
        self.get(key)?.as_int()?.try_into().ok()
    }

    /// An integer of any width that fits.
    pub fn u64(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_int()?.try_into().ok()
    }

    /// An integer of any width that fits.
    pub fn i64(&self, key: &str) -> Option<i64> {
        self.get(key)?.as_int()?.try_into().ok()
    }

    /// A float; f64 is rounded.
    pub fn f32(&self, key: &str) -> Option<f32> {
        self.get(key)?.as_f32()
    }

    /// A boolean.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// An array, with elements of any type.
    pub fn array(&self, key: &str) -> Option<Array<'_>> {
        match self.get(key)? {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Option<Vec<String>> {
        self.elements(key, |value| match value {
            Value::String(text) => Some(text.to_owned()),
            _ => None,
        })
    }

    /// An array of integers of any width, all of which fit.
    pub fn u32s(&self, key: &str) -> Option<Vec<u32>> {
        self.elements(key, |value| value.as_int()?.try_into().ok())
    }

    /// An array of integers of any width, all of which fit.
    pub fn i32s(&self, key: &str) -> Option<Vec<i32>> {
        self.elements(key, |value| value.as_int()?.try_into().ok())
    }

    /// An array of floats; f64 is rounded.
    pub fn f32s(&self, key: &str) -> Option<Vec<f32>> {
        self.elements(key, |value| value.as_f32())
    }

    /// An array of booleans.
    pub fn bools(&self, key: &str) -> Option<Vec<bool>> {
        self.elements(key, |value| match value {
            Value::Bool(value) => Some(value),
            _ => None,
        })
    }

    fn elements<T>(&self, key: &str, convert: impl Fn(Value<'_>) -> Option<T>) -> Option<Vec<T>> {
        self.array(key)?.iter().map(convert).collect()
    }
}

impl crate::text::TokenizerMetadata for Metadata {
    fn str(&self, key: &str) -> Option<&str> {
        self.str(key)
    }

    fn u32(&self, key: &str) -> Option<u32> {
        self.u32(key)
    }

    fn bool(&self, key: &str) -> Option<bool> {
        self.bool(key)
    }

    fn strings(&self, key: &str) -> Option<Vec<String>> {
        self.strings(key)
    }

    fn i32s(&self, key: &str) -> Option<Vec<i32>> {
        self.i32s(key)
    }

    fn f32s(&self, key: &str) -> Option<Vec<f32>> {
        self.f32s(key)
    }
}
