//! Conversion of messages and other JSON to values of the template engine.

#![forbid(unsafe_code)]

use serde_json::{Map, Value};

use crate::text::ChatMessage;

/// Converts a message to a value of the template engine.
pub(super) fn message(message: &ChatMessage) -> minijinja::Value {
    object(message.fields())
}

/// Returns the approximate number of text bytes of a message.
pub(super) fn message_bytes(message: &ChatMessage) -> usize {
    message.fields().iter().map(|(key, value)| 64 + key.len() + weight_bytes(value)).sum()
}

/// Returns the approximate number of text bytes of a value; each value counts at least 64 bytes.
pub(super) fn weight_bytes(value: &Value) -> usize {
    64 + match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(weight_bytes).sum(),
        Value::Object(fields) => fields.iter().map(|(key, value)| key.len() + weight_bytes(value)).sum(),
    }
}

/// Converts a JSON value to a value of the template engine; keys keep their order.
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
