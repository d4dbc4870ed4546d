//! Metadata of a GGUF file: its key-value store.
//!
//! Values stay in the file; memory holds only a small record per key. Getters widen integers (a writer may choose any
//! width) and never convert between kinds: a number is not a string, and an integer is not a float.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::reader::Reader;
use super::value::{Array, Value};
use crate::weights::mmap::FileMap;

/// Size of the smallest pair: an empty key, a type, and a value of one byte.
const MIN_PAIR_BYTES: u64 = 8 + 4 + 1;

/// Metadata of one file, by key.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: Arc<FileMap>,
    /// Pairs in file order.
    pairs: Vec<Pair>,
    /// Indices into `pairs`, sorted by key.
    by_key: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Pair {
    key: Range<usize>,
    /// Range of the value in the file, including its type number.
    value: Range<usize>,
}

impl Metadata {
    /// Reads `count` pairs; time and memory are proportional to the bytes of the file, not to `count`.
    pub(super) fn read(file: &Arc<FileMap>, reader: &mut Reader<'_>, count: u64) -> Result<Self, String> {
        if count > reader.remaining() as u64 / MIN_PAIR_BYTES {
            let left = reader.remaining();
            return Err(format!(
                "the header contains a count of {count} metadata pairs, but only {left} bytes are left"
            ));
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
        let len = u32::try_from(metadata.pairs.len())
            .map_err(|_| format!("the file has {count} metadata pairs, expected at most u32::MAX"))?;
        let mut by_key: Vec<u32> = (0..len).collect();
        by_key.sort_unstable_by_key(|&id| metadata.key(id));
        if let Some(twice) = by_key.windows(2).find(|ids| metadata.key(ids[0]) == metadata.key(ids[1])) {
            return Err(format!("metadata key {:?} occurs twice", metadata.key(twice[0])));
        }
        metadata.by_key = by_key;
        Ok(metadata)
    }

    fn key(&self, id: u32) -> &str {
        self.key_of(&self.pairs[id as usize])
    }

    fn key_of(&self, pair: &Pair) -> &str {
        let key = &self.file.bytes()[pair.key.clone()];
        // `Metadata::read` has checked that the key is UTF-8.
        std::str::from_utf8(key).unwrap_or_default()
    }

    fn value(&self, id: u32) -> Option<Value<'_>> {
        let mut reader = Reader::new(&self.file.bytes()[self.pairs[id as usize].value.clone()]);
        Value::read(&mut reader).ok()
    }

    /// Iterates over the keys in file order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.pairs.iter().map(|pair| self.key_of(pair))
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Returns whether the metadata has no keys.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Returns the value of a key, of any type.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let at = self.by_key.binary_search_by(|&id| self.key(id).cmp(key)).ok()?;
        self.value(self.by_key[at])
    }

    /// Returns the value of `general.architecture`.
    pub fn architecture(&self) -> Option<&str> {
        self.str("general.architecture")
    }

    /// Returns a string.
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::String(value) => Some(value),
            _ => None,
        }
    }

    /// Returns an integer of any width, if its value fits.
    pub fn u32(&self, key: &str) -> Option<u32> {
        self.get(key)?.as_int()?.try_into().ok()
    }

    /// Returns an integer of any width, if its value fits.
    pub fn u64(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_int()?.try_into().ok()
    }

    /// Returns an integer of any width, if its value fits.
    pub fn i64(&self, key: &str) -> Option<i64> {
        self.get(key)?.as_int()?.try_into().ok()
    }

    /// Returns a float; f64 is rounded.
    pub fn f32(&self, key: &str) -> Option<f32> {
        self.get(key)?.as_f32()
    }

    /// Returns a boolean.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// Returns an array with elements of any type.
    pub fn array(&self, key: &str) -> Option<Array<'_>> {
        match self.get(key)? {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }

    /// Returns an array of strings.
    pub fn strings(&self, key: &str) -> Option<Vec<String>> {
        self.elements(key, |value| match value {
            Value::String(text) => Some(text.to_owned()),
            _ => None,
        })
    }

    /// Returns an array of integers of any width, if all values fit.
    pub fn u32s(&self, key: &str) -> Option<Vec<u32>> {
        self.elements(key, |value| value.as_int()?.try_into().ok())
    }

    /// Returns an array of integers of any width, if all values fit.
    pub fn i32s(&self, key: &str) -> Option<Vec<i32>> {
        self.elements(key, |value| value.as_int()?.try_into().ok())
    }

    /// Returns an array of floats; f64 is rounded.
    pub fn f32s(&self, key: &str) -> Option<Vec<f32>> {
        self.elements(key, |value| value.as_f32())
    }

    /// Returns an array of booleans.
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
