//! Behavior of Python that the template engine lacks: methods of its types, and the rules for iteration.
//!
//! Most methods come from `minijinja-contrib`; this module adds a few more that real templates use.

use minijinja::value::{Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};

/// Calls a Python method of a string, list or dict.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments) {
        Err(error) if error.kind() == ErrorKind::UnknownMethod => match value.kind() {
            ValueKind::String => string_method(value.as_str().unwrap_or_default(), name, arguments),
            _ => Err(error),
        },
        done => done,
    }
}

/// Returns whether Python can iterate over the value: `None` is not iterable, an undefined variable is an empty list.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Returns whether the value has a length and items: lists, strings and dicts.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
}

/// Returns whether the value is a number; booleans are numbers.
pub(super) fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
}

/// Returns the value that a loop iterates over; an error for `None`.
pub(super) fn iterable(value: Value) -> Result<Value, Error> {
    if value.is_none() {
        return Err(Error::new(ErrorKind::InvalidOperation, "'NoneType' object is not iterable"));
    }
    Ok(value)
}

fn string_method(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let (found, missing) = if name == "partition" {
                (text.split_once(separator), [text, "", ""])
            } else {
                (text.rsplit_once(separator), ["", "", text])
            };
            let parts = found.map_or(missing, |(before, after)| [before, separator, after]);
            Ok(parts.into_iter().map(Value::from).collect())
        }
        "rsplit" => {
            let (separator, limit): (&str, Option<usize>) = from_args(arguments)?;
            let mut parts: Vec<&str> = match limit {
                Some(limit) => text.rsplitn(limit.saturating_add(1), separator).collect(),
                None => text.rsplit(separator).collect(),
            };
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}
