//! `model.safetensors.index.json`, which maps tensors to shards.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, Visitor};

use super::input_file::{placeholder, relative_name_fault};
use super::names::{name_fault, printable};

/// The maximum size of an index.
pub(crate) const MAX_INDEX_BYTES: u64 = 64 << 20;

#[derive(Debug, Default)]
pub(crate) struct ShardIndex {
    /// Sorted.
    pub(crate) shards: Vec<String>,
    /// Index into `shards` by tensor.
    pub(crate) weight_map: BTreeMap<String, usize>,
    /// `metadata.total_size`: a number of bytes, or the text of a number that cannot be one.
    pub(crate) total_size: Option<Result<u64, String>>,
}

impl ShardIndex {
    /// Parses an index.
    ///
    /// # Errors
    /// A description of the problem that names the field.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        if let Some(found) = placeholder(bytes) {
            return Err(found.to_string());
        }
        let text = std::str::from_utf8(bytes)
            .map_err(|e| format!("is not valid UTF-8 at byte {}", e.valid_up_to()))?;
        let mut raw = RawIndex::default();
        let mut deserializer = serde_json::Deserializer::from_str(text);
        (&mut raw)
            .deserialize(&mut deserializer)
            .and_then(|()| deserializer.end())
            .map_err(|e| printable(&e.to_string()))?;
        let Some(pairs) = raw.weight_map else {
            return Err("the field `weight_map` is missing".into());
        };
        if pairs.is_empty() {
            return Err("`weight_map` is empty".into());
        }
        let names: BTreeSet<&str> = pairs.values().map(String::as_str).collect();
        let shards: Vec<String> = names.into_iter().map(str::to_owned).collect();
        let mut folded = BTreeMap::new();
        for shard in &shards {
            if let Some(other) = folded.insert(shard.to_lowercase(), shard) {
                return Err(format!("the shards `{other}` and `{shard}` differ only in case"));
            }
        }
        let weight_map = pairs
            .into_iter()
            .map(|(tensor, shard)| {
                let position = shards.binary_search(&shard).unwrap_or_default();
                (tensor, position)
            })
            .collect();
        Ok(Self { weight_map, total_size: raw.metadata.unwrap_or_default().0, shards })
    }
}

#[derive(Default)]
struct RawIndex {
    metadata: Option<IndexMetadata>,
    weight_map: Option<BTreeMap<String, String>>,
}

impl<'de> DeserializeSeed<'de> for &mut RawIndex {
    type Value = ();

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut RawIndex {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `weight_map`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            let again = match key.as_str() {
                "metadata" => self.metadata.replace(map.next_value()?).is_some(),
                "weight_map" => {
                    let WeightMap(pairs) = map.next_value()?;
                    self.weight_map.replace(pairs).is_some()
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    false
                }
            };
            if again {
                return Err(de::Error::custom(format_args!("the key `{key}` appears twice")));
            }
        }
        Ok(())
    }
}

/// Names are checked while parsing, so that the message can give the line.
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object `weight_map` from tensor to shard")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut pairs = BTreeMap::new();
                while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
                    let fault = if let Some(fault) = name_fault(&tensor) {
                        format!("`weight_map`: the tensor name `{}` {fault}", printable(&tensor))
                    } else if let Some(fault) = relative_name_fault(&shard) {
                        format!("`weight_map`: the shard name `{}` {fault}", printable(&shard))
                    } else if !shard.ends_with(".safetensors") {
                        format!("`weight_map`: the shard `{}` is not a .safetensors file", printable(&shard))
                    } else {
                        match pairs.entry(tensor) {
                            Entry::Occupied(old) => {
                                format!("`weight_map`: the tensor `{}` appears twice", old.key())
                            }
                            Entry::Vacant(place) => {
                                place.insert(shard);
                                continue;
                            }
                        }
                    };
                    return Err(de::Error::custom(fault));
                }
                Ok(WeightMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// Only `total_size` is used, for a warning.
#[derive(Default)]
struct IndexMetadata(Option<Result<u64, String>>);

impl<'de> Deserialize<'de> for IndexMetadata {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = IndexMetadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object `metadata`")
            }

            fn visit_unit<E>(self) -> Result<IndexMetadata, E> {
                Ok(IndexMetadata(None))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<IndexMetadata, A::Error> {
                let mut total = None;
                while let Some(key) = map.next_key::<String>()? {
                    if key != "total_size" {
                        map.next_value::<IgnoredAny>()?;
                    } else if total.replace(map.next_value::<TotalSize>()?.0).is_some() {
                        return Err(de::Error::custom("`total_size` appears twice"));
                    }
                }
                Ok(IndexMetadata(total))
            }
        }
        deserializer.deserialize_any(Fields)
    }
}

/// Floats, which some writers give, and negative numbers are kept as text.
struct TotalSize(Result<u64, String>);

impl<'de> Deserialize<'de> for TotalSize {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Count;
        impl Visitor<'_> for Count {
            type Value = TotalSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number `total_size`")
            }

            fn visit_u64<E>(self, value: u64) -> Result<TotalSize, E> {
                Ok(TotalSize(Ok(value)))
            }

            fn visit_i64<E>(self, value: i64) -> Result<TotalSize, E> {
                Ok(TotalSize(Err(value.to_string())))
            }

            fn visit_f64<E>(self, value: f64) -> Result<TotalSize, E> {
                Ok(TotalSize(Err(value.to_string())))
            }
        }
        deserializer.deserialize_any(Count)
    }
}
