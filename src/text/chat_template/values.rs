//! Messages and other JSON as templates see them.

#![forbid(unsafe_code)]

use serde_json::{Map, Value};

use crate::text::ChatMessage;

/// The message as the template sees it.
pub(super) fn message(message: &ChatMessage) -> minijinja::Value {
    object(message.fields())
}

/// Bytes of text in a message, about.
pub(super) fn message_bytes(message: &ChatMessage) -> usize {
    message.fields().iter().map(|(key, value)| 64 + key.len() + weight_bytes(value)).sum()
}

/// Bytes of text in a value, about; every value counts a little, however short.
pub(super) fn weight_bytes(value: &Value) -> usize {
    64 + match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(weight_bytes).sum(),
        Value::Object(fields) => fields.iter().map(|(key, value)| key.len() + weight_bytes(value)).sum(),
    }
}

/// A JSON value as the template sees it, keys in their order.
pub(super) fn to_template(value: &Value) -> minijinja::Value {
    match value {
        Value::Null => minijinja::Value::from(()),
        Value::Bool(truth) => (*truth).into(),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => integer.into(),
            (None, Some(integer)) => integer.into(),
            (None, None) => number.as_f64().unwrap_or(f64::NAN).into(),
        },
        Value::String(text) => text.as_str().into(),
        Value::Array(items) => items.iter().map(to_template).collect(),
        Value::Object(fields) => object(fields),
    }
}

fn object(fields: &Map<String, Value>) -> minijinja::Value {
    minijinja::Value::from_pairs(fields.iter().map(|(key, value)| (key.as_str(), to_template(value))))
}
