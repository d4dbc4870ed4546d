//! The JSON header of one safetensors file, checked in full before a tensor is handed out.
//!
//! Types and sizes of elements are the `safetensors` crate's. The map around them is read here, in one streaming pass:
//! the crate's own pass buffers the whole header as a tree of values, which costs a hostile header about fifty times
//! its size, and it takes the last of two tensors of one name. The rules enforced are the format's: the header begins
//! with `{` (a leading space is refused), offsets are in bounds, the data section is covered without hole or overlap,
//! and type times shape is the span.

#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use crate::weights::DType;

/// Longest header that is read: the format's own limit, 100 MB.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The length field before the header.
const LENGTH_BYTES: usize = 8;

/// One tensor of a file; `data` counts from the start of the file.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: Result<DType, Dtype>,
    pub(super) shape: Vec<usize>,
    pub(super) data: Range<usize>,
}

/// Reads and checks the header of a whole file, and lists its tensors in the order of their data.
pub(super) fn parse(file: &[u8]) -> Result<Vec<Entry>, String> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("{} bytes are too few for the 8 bytes of header length", file.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!("header length is {length} bytes, expected at most {MAX_HEADER_BYTES}"));
    }
    let header = usize::try_from(length).ok().and_then(|length| rest.get(..length));
    let Some(header) = header else {
        return Err(format!("header length is {length} bytes, but only {} follow it", rest.len()));
    };
    let data_len = rest.len() - header.len();
    let data_start = file.len() - data_len;
    let text = std::str::from_utf8(header).map_err(|error| format!("header is not UTF-8: {error}"))?;
    if !text.starts_with('{') {
        return Err("header does not begin with '{'".to_owned());
    }
    let Tensors(mut tensors) = serde_json::from_str(text).map_err(|error| format!("header is not valid: {error}"))?;

    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    if let Some(twice) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("tensor {:?} is listed twice", twice[0].0));
    }
    // Empty tensors share their offset with a neighbour; the name decides, so the order is one of the file alone.
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let mut covered = 0;
    let mut entries = Vec::with_capacity(tensors.len());
    for (name, info) in tensors {
        let (begin, end) = info.data_offsets;
        if begin > end {
            return Err(format!("tensor {name:?} begins at {begin} and ends before, at {end}"));
        }
        if end > data_len {
            return Err(format!("tensor {name:?} ends at {end}, but there are {data_len} bytes of data"));
        }
        if begin != covered {
            let what = if begin < covered { "overlaps its neighbour" } else { "leaves unused bytes before it" };
            return Err(format!("tensor {name:?} {what}: it begins at {begin}, expected {covered}"));
        }
        let span = end - begin;
        if span_bytes(&info) != Some(span) {
            let (dtype, shape) = (info.dtype, &info.shape);
            return Err(format!(
                "tensor {name:?} spans {span} bytes, which {dtype:?} of shape {shape:?} does not fill"
            ));
        }
        covered = end;
        let data = data_start + begin..data_start + end;
        entries.push(Entry { name, dtype: float_type(info.dtype), shape: info.shape, data });
    }
    if covered != data_len {
        return Err(format!("tensors end at {covered}, but there are {data_len} bytes of data"));
    }
    Ok(entries)
}

fn span_bytes(info: &TensorInfo) -> Option<usize> {
    let elements = info.shape.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim))?;
    let bits = elements.checked_mul(info.dtype.bitsize())?;
    (bits % 8 == 0).then_some(bits / 8)
}

fn float_type(dtype: Dtype) -> Result<DType, Dtype> {
    match dtype {
        Dtype::F32 => Ok(DType::F32),
        Dtype::F16 => Ok(DType::F16),
        Dtype::BF16 => Ok(DType::BF16),
        other => Err(other),
    }
}

/// The header's map without `__metadata__`, in the order of the text.
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

/// A map of strings that is checked and not kept.
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

/// A string that is checked and not kept.
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
