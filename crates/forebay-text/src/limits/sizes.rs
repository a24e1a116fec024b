//! Sizes of a JSON text, found without keeping it.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// Number of values, and bytes of the texts among them and of keys.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub values: usize,
    pub longest: usize,
    pub bytes: usize,
}

impl Sizes {
    /// Measures a JSON text.
    ///
    /// # Errors
    /// Returns an error if the text is not valid JSON, or if a list or an object has more than `most` values.
    pub fn of(text: &str, most: usize) -> serde_json::Result<Sizes> {
        let sizes: Sizes = serde_json::from_str(text)?;
        if sizes.values > most {
            return Err(serde_json::Error::custom(format!("more than {most} JSON values")));
        }
        Ok(sizes)
    }

    fn of_text(text: &str) -> Sizes {
        Sizes { values: 1, longest: text.len(), bytes: text.len() }
    }

    fn add(&mut self, other: Sizes) {
        self.values += other.values;
        self.longest = self.longest.max(other.longest);
        self.bytes += other.bytes;
    }
}

impl<'de> Deserialize<'de> for Sizes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Measure)
    }
}

struct Measure;

const ONE: Sizes = Sizes { values: 1, longest: 0, bytes: 0 };

impl<'de> Visitor<'de> for Measure {
    type Value = Sizes;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Sizes, E> {
        Ok(ONE)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Sizes, E> {
        Ok(ONE)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Sizes, E> {
        Ok(ONE)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Sizes, E> {
        Ok(ONE)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Sizes, E> {
        Ok(ONE)
    }

    fn visit_str<E>(self, text: &str) -> Result<Sizes, E> {
        Ok(Sizes::of_text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Sizes, A::Error> {
        let mut sum = ONE;
        while let Some(item) = items.next_element()? {
            sum.add(item);
        }
        Ok(sum)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Sizes, A::Error> {
        let mut sum = ONE;
        while let Some((key, value)) = entries.next_entry::<Sizes, Sizes>()? {
            sum.add(key);
            sum.add(value);
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_values_and_texts_count() {
        let sizes = |text: &str| Sizes::of(text, 100).unwrap();
        assert_eq!(sizes("null"), ONE);
        assert_eq!(
            sizes(r#"{"ab": ["é", 1, -2, 0.5, true], "c": {}}"#),
            Sizes { values: 10, longest: 2, bytes: 5 }
        );
        assert!(Sizes::of("[1", 100).is_err());
        assert!(Sizes::of("[1,2,3]", 3).is_err());
    }
}
