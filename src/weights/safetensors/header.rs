//! JSON header of one safetensors file, checked completely before a tensor is returned.
//!
//! The header is parsed in one streaming pass. The `safetensors` crate buffers the whole header as a tree of values,
//! which needs about fifty times the size of a malicious header, and it keeps the last of two tensors with the same
//! name. This module enforces the rules of the format: the header begins with `{` (leading white space is an error),
//! offsets are in bounds, the tensors cover the data section without gaps or overlaps, and each tensor's range has the
//! size of its type and shape.

#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, MapAccess, Unexpected, Visitor};

use crate::weights::DType;

/// Largest accepted header: the format's own limit, 100 MB.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Size of the length field before the header.
const LENGTH_BYTES: usize = 8;

/// Element types of the format: name, bits per element, and the [`DType`] if this crate supports the type.
///
/// A file may contain tensors of any of these types; only the tensors that a model requests must have a supported type.
const ELEMENT_TYPES: [ElementType; 22] = [
    ElementType::unsupported("BOOL", 8),
    ElementType::unsupported("F4", 4),
    ElementType::unsupported("F6_E2M3", 6),
    ElementType::unsupported("F6_E3M2", 6),
    ElementType::unsupported("U8", 8),
    ElementType::unsupported("I8", 8),
    ElementType::unsupported("F8_E5M2", 8),
    ElementType::unsupported("F8_E4M3", 8),
    ElementType::unsupported("F8_E8M0", 8),
    ElementType::unsupported("F8_E4M3FNUZ", 8),
    ElementType::unsupported("F8_E5M2FNUZ", 8),
    ElementType::unsupported("I16", 16),
    ElementType::unsupported("U16", 16),
    ElementType { name: "F16", bits: 16, supported: Some(DType::F16) },
    ElementType { name: "BF16", bits: 16, supported: Some(DType::BF16) },
    ElementType::unsupported("I32", 32),
    ElementType::unsupported("U32", 32),
    ElementType { name: "F32", bits: 32, supported: Some(DType::F32) },
    ElementType::unsupported("C64", 64),
    ElementType::unsupported("F64", 64),
    ElementType::unsupported("I64", 64),
    ElementType::unsupported("U64", 64),
];

#[derive(Clone, Copy, Debug)]
struct ElementType {
    name: &'static str,
    bits: usize,
    supported: Option<DType>,
}

impl ElementType {
    const fn unsupported(name: &'static str, bits: usize) -> Self {
        Self { name, bits, supported: None }
    }
}

/// Tensor in the header; offsets are relative to the end of the header.
#[derive(serde::Deserialize)]
struct TensorInfo {
    dtype: ElementType,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// Tensor of a file; `data` is relative to the start of the file.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    /// The type, or the format's name of a type that this crate does not support.
    pub(super) dtype: Result<DType, &'static str>,
    pub(super) shape: Vec<usize>,
    pub(super) data: Range<usize>,
}

/// Parses and checks the header of a whole file, and returns its tensors in the order of their data.
pub(super) fn parse(file: &[u8]) -> Result<Vec<Entry>, String> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("the file has {} bytes, expected at least the 8 bytes of the header length", file.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!("the header length is {length} bytes, expected at most {MAX_HEADER_BYTES}"));
    }
    let header = usize::try_from(length).ok().and_then(|length| rest.get(..length));
    let Some(header) = header else {
        return Err(format!("the header length is {length} bytes, but only {} bytes are left", rest.len()));
    };
    let data_len = rest.len() - header.len();
    let data_start = file.len() - data_len;
    let text = std::str::from_utf8(header).map_err(|error| format!("the header is not UTF-8: {error}"))?;
    if !text.starts_with('{') {
        return Err("the header does not begin with '{'".to_owned());
    }
    let Tensors(mut tensors) = serde_json::from_str(text).map_err(|error| format!("the header is invalid: {error}"))?;

    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    if let Some(twice) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("tensor {:?} is listed twice", twice[0].0));
    }
    // Empty tensors have the same offset as the next tensor. The sort is stable and the tensors are sorted by name, so
    // the order depends only on the file.
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let mut covered = 0;
    let mut entries = Vec::with_capacity(tensors.len());
    for (name, info) in tensors {
        let (begin, end) = info.data_offsets;
        if begin > end {
            return Err(format!(
                "tensor {name:?} begins at {begin} and ends at {end}, expected an end after the begin"
            ));
        }
        if end > data_len {
            return Err(format!(
                "tensor {name:?} ends at {end}, expected at most {data_len}, the number of data bytes"
            ));
        }
        if begin != covered {
            let what = if begin < covered { "overlaps the tensor before it" } else { "leaves unused bytes before it" };
            return Err(format!("tensor {name:?} {what}: it begins at {begin}, expected {covered}"));
        }
        let span = end - begin;
        if span_bytes(&info) != Some(span) {
            let (dtype, shape) = (info.dtype.name, &info.shape);
            return Err(format!("tensor {name:?} spans {span} bytes, which does not match {dtype} of shape {shape:?}"));
        }
        covered = end;
        let data = data_start + begin..data_start + end;
        entries.push(Entry { name, dtype: info.dtype.supported.ok_or(info.dtype.name), shape: info.shape, data });
    }
    if covered != data_len {
        return Err(format!("the tensors end at {covered}, expected {data_len}, the number of data bytes"));
    }
    Ok(entries)
}

fn span_bytes(info: &TensorInfo) -> Option<usize> {
    let elements = info.shape.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim))?;
    let bits = elements.checked_mul(info.dtype.bits)?;
    (bits % 8 == 0).then_some(bits / 8)
}

impl<'de> Deserialize<'de> for ElementType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = ElementType;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a type of the safetensors format")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<ElementType, E> {
                let known = ELEMENT_TYPES.into_iter().find(|element| element.name == name);
                known.ok_or_else(|| E::invalid_value(Unexpected::Str(name), &self))
            }
        }
        deserializer.deserialize_str(Name)
    }
}

/// Map of the header without `__metadata__`, in the order of the text.
struct Tensors(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for Tensors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Header;
        impl<'de> Visitor<'de> for Header {
            type Value = Tensors;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tensors, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<TextMap>()?;
                    } else {
                        tensors.push((name, map.next_value()?));
                    }
                }
                Ok(Tensors(tensors))
            }
        }
        deserializer.deserialize_map(Header)
    }
}

/// Object of strings that is checked and discarded.
struct TextMap;

impl<'de> Deserialize<'de> for TextMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = TextMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TextMap, A::Error> {
                while map.next_entry::<Text, Text>()?.is_some() {}
                Ok(TextMap)
            }

            fn visit_unit<E>(self) -> Result<TextMap, E> {
                Ok(TextMap)
            }
        }
        deserializer.deserialize_any(Entries)
    }
}

/// String that is checked and discarded.
struct Text;

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl Visitor<'_> for Any {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E>(self, _: &str) -> Result<Text, E> {
                Ok(Text)
            }
        }
        deserializer.deserialize_str(Any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_types_are_those_of_the_formats_own_crate() {
        for element in ELEMENT_TYPES {
            let theirs: ::safetensors::Dtype = serde_json::from_str(&format!("{:?}", element.name)).unwrap();
            assert_eq!((element.name, element.bits), (theirs.to_string().as_str(), theirs.bitsize()));
        }
        let unknown = serde_json::from_str::<::safetensors::Dtype>("\"F128\"").unwrap_err().to_string();
        assert_eq!(unknown.matches('`').count() / 2, 1 + ELEMENT_TYPES.len(), "{unknown}");
    }

    #[test]
    fn an_unknown_type_is_an_error_with_its_name() {
        let header = br#"{"w":{"dtype":"F128","shape":[1],"data_offsets":[0,16]}}"#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 16]].concat();
        let error = parse(&file).unwrap_err();
        assert!(error.contains("F128") && error.contains("a type of the safetensors format"), "{error}");
    }
}
