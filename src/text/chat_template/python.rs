//! Methods of Python's types that templates call and the template engine lacks.
//!
//! Most come from `minijinja-contrib`; here are the few more that real templates use.

use minijinja::value::{Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};

/// Calls a method of Python on a string, list or dict.
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
