//! Parses compile options from files, and checks their ranges. A refused value gives the message of
//! [`CompileError::Option`], whether it comes from a file or from code.

use std::fmt;

use serde::de::{Deserializer, Visitor};

use crate::graph::{CompileError, CompileOptions, OverflowPolicy, Precision};

/// Smallest and largest value of an integer option, and their description.
fn range(option: &'static str) -> (u8, u8, &'static str) {
    match option {
        "opt_level" => (0, CompileOptions::MAX_OPT_LEVEL, "a level from 0 to 3"),
        "fusion" => (0, CompileOptions::MAX_FUSION, "a level from 0 to 3 (or \"none\", \"all\")"),
        _ => (1, CompileOptions::MAX_PARALLEL_OPS, "a number from 1 to 4"),
    }
}

/// Refuses an integer option out of its range.
pub(crate) fn check(option: &'static str, value: Option<u8>) -> Result<(), CompileError> {
    let (least, most, expected) = range(option);
    match value {
        Some(value) if value < least || value > most => {
            Err(CompileError::Option { option, value: value.to_string(), expected })
        }
        _ => Ok(()),
    }
}

/// A scalar value in a file.
#[derive(Debug)]
enum Given {
    Nothing,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
}

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value:?}"),
            Self::Text(value) => write!(f, "{value:?}"),
        }
    }
}

/// Accepts any scalar; anything else is refused with the name of the option.
struct Scalar(&'static str, &'static str);

impl Visitor<'_> for Scalar {
    type Value = Given;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "for compile option {} {}", self.0, self.1)
    }

    fn visit_unit<E>(self) -> Result<Given, E> {
        Ok(Given::Nothing)
    }

    fn visit_none<E>(self) -> Result<Given, E> {
        Ok(Given::Nothing)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Given, E> {
        Ok(Given::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Given, E> {
        Ok(Given::Int(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Given, E> {
        Ok(Given::Int(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Given, E> {
        Ok(Given::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Given, E> {
        Ok(Given::Text(value.to_owned()))
    }
}

fn refuse<E: serde::de::Error>(option: &'static str, value: &Given, expected: &'static str) -> E {
    E::custom(CompileError::Option { option, value: value.to_string(), expected })
}

fn counted<'de, D: Deserializer<'de>>(
    from: D,
    option: &'static str,
    names: &[(&str, u8)],
) -> Result<Option<u8>, D::Error> {
    let (least, most, expected) = range(option);
    let given = from.deserialize_any(Scalar(option, expected))?;
    let value = match &given {
        Given::Nothing => return Ok(None),
        Given::Int(value) => u8::try_from(*value).ok(),
        Given::Text(text) => names.iter().find(|(name, _)| name == text).map(|(_, value)| *value),
        Given::Bool(_) | Given::Float(_) => None,
    };
    match value {
        Some(value) if (least..=most).contains(&value) => Ok(Some(value)),
        _ => Err(refuse(option, &given, expected)),
    }
}

pub(crate) fn opt_level<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u8>, D::Error> {
    counted(from, "opt_level", &[])
}

pub(crate) fn fusion<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u8>, D::Error> {
    counted(from, "fusion", &[("none", 0), ("all", CompileOptions::MAX_FUSION)])
}

pub(crate) fn parallel_ops<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u8>, D::Error> {
    counted(from, "parallel_ops", &[])
}

pub(crate) fn memory_reuse<'de, D: Deserializer<'de>>(from: D) -> Result<Option<bool>, D::Error> {
    let expected = "true or false";
    match from.deserialize_any(Scalar("memory_reuse", expected))? {
        Given::Nothing => Ok(None),
        Given::Bool(value) => Ok(Some(value)),
        other => Err(refuse("memory_reuse", &other, expected)),
    }
}

pub(crate) fn precision<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Precision>, D::Error> {
    let expected = "\"f32\", \"bf16\", \"f16\" or \"mix\"";
    let given = from.deserialize_any(Scalar("precision", expected))?;
    let precision = match &given {
        Given::Nothing => return Ok(None),
        Given::Text(text) => match text.as_str() {
            "f32" => Some(Precision::F32),
            "bf16" => Some(Precision::BF16),
            "f16" => Some(Precision::F16),
            "mix" => Some(Precision::Mix),
            _ => None,
        },
        _ => None,
    };
    precision.map(Some).ok_or_else(|| refuse("precision", &given, expected))
}

pub(crate) fn overflow<'de, D: Deserializer<'de>>(from: D) -> Result<Option<OverflowPolicy>, D::Error> {
    let expected = "\"error\", \"clamp\" or \"retry_f32\"";
    let given = from.deserialize_any(Scalar("overflow", expected))?;
    let policies = [OverflowPolicy::Error, OverflowPolicy::Clamp, OverflowPolicy::RetryF32];
    let policy = match &given {
        Given::Nothing => return Ok(None),
        Given::Text(text) => policies.into_iter().find(|policy| policy.name() == text),
        _ => None,
    };
    policy.map(Some).ok_or_else(|| refuse("overflow", &given, expected))
}
