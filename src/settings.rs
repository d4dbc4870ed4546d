//! Macros for structs of settings: `with_*` methods, and a `Deserialize` that rejects unknown keys.
//!
//! It rejects them even if the struct is flattened into another struct.

/// Generates methods that set one public field each, from lists of `field method: type`.
///
/// | list | argument of the method |
/// |---|---|
/// | `value` | the field's type |
/// | `option` | the inner type of the field's `Option`, or an `Option` |
/// | `list` | anything that converts to the field's `Vec` |
/// | `optional_list` | anything that converts to the `Vec` in the field's `Option` |
/// | `texts` | an iterator of values that convert to the elements of the field's `Vec` |
macro_rules! with_methods {
    ($($kind:ident { $($field:ident $method:ident: $type:ty),* $(,)? })*) => {
        $($(with_methods!(@$kind $field $method $type);)*)*
    };
    (@value $field:ident $method:ident $type:ty) => {
        with_methods!(@method $field $method value, $type, value);
    };
    (@option $field:ident $method:ident $type:ty) => {
        with_methods!(@method $field $method value, impl Into<Option<$type>>, value.into());
    };
    (@list $field:ident $method:ident $type:ty) => {
        with_methods!(@method $field $method value, impl Into<Vec<$type>>, value.into());
    };
    (@optional_list $field:ident $method:ident $type:ty) => {
        with_methods!(@method $field $method value, impl Into<Vec<$type>>, Some(value.into()));
    };
    (@texts $field:ident $method:ident $type:ty) => {
        with_methods!(@method $field $method value, impl IntoIterator<Item = impl Into<$type>>,
            value.into_iter().map(Into::into).collect());
    };
    (@method $field:ident $method:ident $value:ident, $argument:ty, $result:expr) => {
        #[doc = concat!("Sets [`", stringify!($field), "`](Self::", stringify!($field), ").")]
        #[must_use]
        pub fn $method(mut self, $value: $argument) -> Self {
            self.$field = $result;
            self
        }
    };
}

/// Implements `Deserialize` for a struct whose absent fields keep their defaults.
///
/// `field as Wrapper` deserializes a field through a newtype.
///
/// With the derived implementation and `deny_unknown_fields`, a struct that is flattened into another never receives
/// the unknown keys. This implementation asks the deserializer for a map instead of a struct: so it receives every key
/// that the outer struct does not name, and it rejects those that are not its own.
macro_rules! deserialize_settings {
    ($name:ident { $($field:ident $(as $wrapper:path)?),* $(,)? }) => {
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                const FIELDS: &[&str] = &[$(stringify!($field)),*];
                struct Settings;
                impl<'de> serde::de::Visitor<'de> for Settings {
                    type Value = $name;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str(concat!("a map of the fields of ", stringify!($name)))
                    }

                    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<$name, A::Error> {
                        use serde::de::Error as _;
                        let mut settings = $name::default();
                        let mut seen: Vec<&'static str> = Vec::new();
                        while let Some(key) = map.next_key::<std::borrow::Cow<'_, str>>()? {
                            let Some(&field) = FIELDS.iter().find(|field| **field == key) else {
                                return Err(A::Error::unknown_field(&key, FIELDS));
                            };
                            if seen.contains(&field) {
                                return Err(A::Error::duplicate_field(field));
                            }
                            seen.push(field);
                            match field {
                                $(stringify!($field) => {
                                    settings.$field = deserialize_settings!(@next map $($wrapper)?);
                                })*
                                _ => unreachable!("the key was found in the list of fields"),
                            }
                        }
                        Ok(settings)
                    }
                }
                deserializer.deserialize_map(Settings)
            }
        }
    };
    (@next $map:ident) => {
        $map.next_value()?
    };
    (@next $map:ident $wrapper:path) => {{
        let $wrapper(value) = $map.next_value()?;
        value
    }};
}

pub(crate) use {deserialize_settings, with_methods};
