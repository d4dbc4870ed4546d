//! Message of a caught panic.

use std::any::Any;

/// Returns the message of a caught panic, or a placeholder if the payload is not a string.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}
