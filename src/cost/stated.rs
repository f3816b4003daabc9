//! A cost that stands in the body of a request.

use std::fmt;

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::decimal::{Decimal, scaled_up};

/// The number at a dotted path of a JSON body, times `scale`, rounded up. `None` if it is absent,
/// no number, or told twice: two parsers could then read it differently.
pub fn number_at(body: &[u8], path: &str, scale: Decimal) -> Option<u64> {
    let names: Vec<&str> = path.split('.').collect();
    let mut found = StatedNumber::default();
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let seed = NumberAt {
        names: &names,
        found: &mut found,
    };
    seed.deserialize(&mut deserializer).ok()?;
    deserializer.end().ok()?;
    let text = found.text.filter(|_| found.times == 1)?;
    scaled_up(text.as_bytes(), scale)
}

#[derive(Debug, Default)]
struct StatedNumber {
    /// How often the path, or a part of it, occurs.
    times: u32,
    text: Option<String>,
}

/// Follows the rest of a path.
struct NumberAt<'a> {
    names: &'a [&'a str],
    found: &'a mut StatedNumber,
}

impl NumberAt<'_> {
    fn number(self, text: String) {
        if self.names.is_empty() {
            self.found.text = Some(text);
        }
    }
}

impl<'de> DeserializeSeed<'de> for NumberAt<'_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for NumberAt<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        self.number(number.to_string());
        Ok(())
    }

    fn visit_i64<E>(self, number: i64) -> Result<(), E> {
        self.number(number.to_string());
        Ok(())
    }

    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.number(number.to_string());
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let Some((wanted, rest)) = self.names.split_first() else {
            while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(());
        };
        let mut met = false;
        while let Some(name) = entries.next_key::<String>()? {
            if name != *wanted {
                entries.next_value::<IgnoredAny>()?;
                continue;
            }
            // a name told twice is unclear at any level
            if met || rest.is_empty() {
                self.found.times += 1;
            }
            met = true;
            entries.next_value_seed(NumberAt {
                names: rest,
                found: &mut *self.found,
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stated_cost_is_a_number_told_once_at_its_path() {
        let at = |body: &str| number_at(body.as_bytes(), "a.b", Decimal::ONE);
        assert_eq!(at(r#"{"x":[1],"a":{"c":2,"b":7}}"#), Some(7));
        assert_eq!(at(r#"{"a":{"b":1.25}}"#), Some(2));
        for unclear in [
            "{}",
            "not JSON",
            r#"{"a":{"b":7}} {"a":{"b":7}}"#,
            r#"{"a":{"b":"7"}}"#,
            r#"{"a":{"b":-7}}"#,
            r#"{"a":{"b":[7]}}"#,
            r#"{"a":[{"b":7}]}"#,
            r#"{"a":{"b":7,"b":8}}"#,
            r#"{"a":{"b":7},"a":{"b":7}}"#,
            r#"{"a":{"b":7},"a":{}}"#,
        ] {
            assert_eq!(at(unclear), None, "{unclear}");
        }
        let milli = Decimal::parse("1000").expect("a scale");
        assert_eq!(number_at(br#"{"a":0.0015}"#, "a", milli), Some(2));
    }
}
