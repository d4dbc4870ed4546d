//! Value types of GGUF metadata; values are decoded in place.

#![forbid(unsafe_code)]

use super::reader::Reader;

/// Largest nesting depth of arrays; real files have no nested arrays.
const MAX_DEPTH: u32 = 8;

/// Type of a metadata value, with its number in the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
#[repr(u32)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn from_id(id: u32) -> Result<Self, String> {
        Self::ALL.get(id as usize).copied().ok_or_else(|| format!("has value type {id}, expected 0 to 12"))
    }

    /// Returns the number of bytes of a value, or the smallest possible number.
    fn min_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// Metadata value, borrowed from the file.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(&'a str),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// Reads the type number and the value after it.
    pub(super) fn read(reader: &mut Reader<'a>) -> Result<Self, String> {
        let ty = ValueType::from_id(reader.u32("value type")?)?;
        Self::read_as(reader, ty, 0)
    }

    fn read_as(reader: &mut Reader<'a>, ty: ValueType, depth: u32) -> Result<Self, String> {
        Ok(match ty {
            ValueType::U8 => Self::U8(u8::from_le_bytes(reader.array("value")?)),
            ValueType::I8 => Self::I8(i8::from_le_bytes(reader.array("value")?)),
            ValueType::U16 => Self::U16(u16::from_le_bytes(reader.array("value")?)),
            ValueType::I16 => Self::I16(i16::from_le_bytes(reader.array("value")?)),
            ValueType::U32 => Self::U32(u32::from_le_bytes(reader.array("value")?)),
            ValueType::I32 => Self::I32(i32::from_le_bytes(reader.array("value")?)),
            ValueType::F32 => Self::F32(f32::from_le_bytes(reader.array("value")?)),
            ValueType::U64 => Self::U64(u64::from_le_bytes(reader.array("value")?)),
            ValueType::I64 => Self::I64(i64::from_le_bytes(reader.array("value")?)),
            ValueType::F64 => Self::F64(f64::from_le_bytes(reader.array("value")?)),
            ValueType::Bool => match reader.array("value")? {
                [0] => Self::Bool(false),
                [1] => Self::Bool(true),
                [other] => return Err(format!("has boolean {other}, expected 0 or 1")),
            },
            ValueType::String => Self::String(reader.string("string value")?),
            ValueType::Array => Self::Array(Array::read(reader, depth)?),
        })
    }

    /// Returns the value as a wide integer if its type is an integer type.
    pub fn as_int(&self) -> Option<i128> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::I8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::I16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::I32(value) => Some(value.into()),
            Self::U64(value) => Some(value.into()),
            Self::I64(value) => Some(value.into()),
            _ => None,
        }
    }

    /// Returns the value as f32 if its type is a float type; f64 is rounded.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Self::F32(value) => Some(value),
            #[allow(clippy::cast_possible_truncation)] // the documentation promises rounding
            Self::F64(value) => Some(value as f32),
            _ => None,
        }
    }
}

/// Array of values of one type, checked when the file was opened and decoded during iteration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
    depth: u32,
}

impl<'a> Array<'a> {
    /// Reads the element type and the length, and checks all elements.
    fn read(reader: &mut Reader<'a>, depth: u32) -> Result<Self, String> {
        if depth >= MAX_DEPTH {
            return Err(format!("has arrays nested more than {MAX_DEPTH} levels deep"));
        }
        let element = ValueType::from_id(reader.u32("array element type")?)?;
        let len = reader.u64("array length")?;
        // Check the length against the remaining bytes before any loop or product.
        if len > reader.remaining() as u64 / element.min_bytes() {
            let left = reader.remaining();
            return Err(format!("has an array of {len} elements of {element:?}, but only {left} bytes are left"));
        }
        let mut walked = reader.clone();
        match element {
            ValueType::String | ValueType::Array | ValueType::Bool => {
                for _ in 0..len {
                    Value::read_as(&mut walked, element, depth + 1)?;
                }
            }
            fixed => {
                walked.take(len * fixed.min_bytes(), "array")?;
            }
        }
        let bytes = reader.take((walked.at() - reader.at()) as u64, "array")?;
        let len =
            usize::try_from(len).map_err(|_| format!("has an array of {len} elements, expected at most usize::MAX"))?;
        Ok(Self { element, len, bytes, depth })
    }

    /// Returns the type of the elements.
    pub fn element(&self) -> ValueType {
        self.element
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the array is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Iterates over the elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut reader = Reader::new(self.bytes);
        let (element, depth) = (self.element, self.depth);
        // `read` has checked every element, so reading cannot fail; an error would end the iteration.
        (0..self.len).map_while(move |_| Value::read_as(&mut reader, element, depth + 1).ok())
    }
}
