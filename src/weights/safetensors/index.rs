//! `model.safetensors.index.json`: maps each tensor to its file.

#![forbid(unsafe_code)]

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

/// Parses the `weight_map` of an index: pairs of tensor name and file name, in the order of the text.
pub(super) fn parse(text: &[u8]) -> Result<Vec<(String, String)>, String> {
    let Index(mut pairs) = serde_json::from_slice(text).map_err(|error| format!("the index is invalid: {error}"))?;
    for (tensor, shard) in &pairs {
        // A shard is in the folder of its index; an index must not refer to a file outside the folder.
        let is_plain = !shard.contains(['/', '\\', '\0']) && !matches!(shard.as_str(), "" | "." | "..");
        if !is_plain {
            return Err(format!(
                "weight_map puts {tensor:?} in {shard:?}, expected the name of a file in the same folder"
            ));
        }
    }
    let mut names: Vec<&String> = pairs.iter().map(|(tensor, _)| tensor).collect();
    names.sort_unstable();
    if let Some([twice, ..]) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("weight_map lists {twice:?} twice"));
    }
    pairs.shrink_to_fit();
    Ok(pairs)
}

struct Index(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Top;
        impl<'de> Visitor<'de> for Top {
            type Value = Index;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with \"weight_map\"")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Index, A::Error> {
                let mut found = None;
                while let Some(key) = map.next_key::<String>()? {
                    if key != "weight_map" {
                        map.next_value::<IgnoredAny>()?;
                    } else if found.is_some() {
                        return Err(serde::de::Error::duplicate_field("weight_map"));
                    } else {
                        found = Some(map.next_value::<Pairs>()?);
                    }
                }
                let Pairs(pairs) = found.ok_or_else(|| serde::de::Error::missing_field("weight_map"))?;
                Ok(Index(pairs))
            }
        }
        deserializer.deserialize_map(Top)
    }
}

struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Map)
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn pairs_come_in_the_order_of_the_text() {
        let text = br#"{"metadata":{"total_size":9},"weight_map":{"b":"x.safetensors","a":"y.safetensors"}}"#;
        let pairs = parse(text).unwrap();
        assert_eq!(pairs, [("b".into(), "x.safetensors".into()), ("a".into(), "y.safetensors".into())]);
    }

    #[test]
    fn an_invalid_index_is_an_error() {
        for bad in [
            &br"[]"[..],
            br"{}",
            br#"{"weight_map":[]}"#,
            br#"{"weight_map":{"a":1}}"#,
            br#"{"weight_map":{"a":"../a.safetensors"}}"#,
            br#"{"weight_map":{"a":"/etc/passwd"}}"#,
            br#"{"weight_map":{"a":""}}"#,
            br#"{"weight_map":{"a":"x","a":"y"}}"#,
            br#"{"weight_map":{},"weight_map":{}}"#,
            b"\xff",
        ] {
            assert!(parse(bad).is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }
}
