//! JSON bodies, read in one pass.

use std::fmt;

use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use super::{
    super::text::{FieldValue, pairs, same},
    names::is_prototype,
};

/// Reads fields from JSON. `None` if parsers disagree about the text as a whole.
pub(super) fn read(bytes: &[u8], fields: &mut [(String, FieldValue)]) -> Option<()> {
    // RFC 8259 §8.1: a parser may ignore a byte order mark
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let text = std::str::from_utf8(text).ok()?;
    // an upstream that parses every body as a form finds a field after each `&`
    for pair in pairs(text.as_bytes())
        .skip(1)
        .filter(|pair| pair.name.exact)
    {
        fields
            .iter_mut()
            .for_each(|(wanted, given)| given.add_pair(&pair, wanted));
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let mut path = String::new();
    let here = JsonPosition {
        fields: &mut *fields,
        path: &mut path,
    };
    here.deserialize(&mut deserializer).ok()?;
    deserializer.end().ok()
}

/// A value in the JSON text, and the dotted path to it.
struct JsonPosition<'f> {
    fields: &'f mut [(String, FieldValue)],
    path: &'f mut String,
}

impl JsonPosition<'_> {
    /// The wanted fields at this path.
    fn exactly(&mut self) -> impl Iterator<Item = &mut FieldValue> {
        let path = &*self.path;
        let wanted = self.fields.iter_mut();
        wanted.filter_map(move |(name, given)| same(name, path).then_some(given))
    }

    /// Whether a wanted field may be inside this value.
    fn may_contain_wanted(&self) -> bool {
        self.fields
            .iter()
            .any(|(name, _)| is_inside(self.path, name))
    }

    fn text(mut self, text: &str) {
        self.exactly().for_each(|given| given.add(text));
    }

    fn unclear(mut self) {
        self.exactly()
            .for_each(|given| *given = FieldValue::Unclear);
    }

    /// JavaScript reads an integer as the nearest double, Python as it is.
    fn integer(self, magnitude: u64, text: &str) {
        match is_double(magnitude) {
            true => self.text(text),
            false => self.unclear(),
        }
    }
}

/// From here on a double may stand for several integers: 2⁵³.
const INEXACT_MIN: f64 = 9_007_199_254_740_992.0;

/// Whether a double holds this integer exactly: its significant bits are 53 at most.
fn is_double(integer: u64) -> bool {
    let width = u64::BITS - integer.leading_zeros();
    width <= f64::MANTISSA_DIGITS + integer.trailing_zeros()
}

/// Whether `name` lies inside `path`. An empty path contains everything.
fn is_inside(path: &str, name: &str) -> bool {
    let dots = name.match_indices('.');
    path.is_empty() || dots.into_iter().any(|(dot, _)| same(&name[..dot], path))
}

impl<'de> DeserializeSeed<'de> for JsonPosition<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for JsonPosition<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.text(if value { "true" } else { "false" });
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.integer(value, &value.to_string());
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.integer(value.unsigned_abs(), &value.to_string());
        Ok(())
    }

    /// `1.0`, `10e-1` and `1` are one number, and so are numbers with the same `f64` value, which
    /// serde_json's feature `float_roundtrip` makes the nearest one. This is also called for integers
    /// that `u64` and `i64` cannot hold. Some upstreams drop a fraction, others keep it.
    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        if value.abs() >= INEXACT_MIN || value.fract() != 0.0 {
            self.unclear();
            return Ok(());
        }
        self.text(&if value == 0.0 { 0.0 } else { value }.to_string());
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        self.text(value);
        Ok(())
    }

    /// Some upstreams use the first item of a list or search it, so its value is unclear.
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        for (name, given) in &mut *self.fields {
            if same(name, self.path) || is_inside(self.path, name) {
                *given = FieldValue::Unclear;
            }
        }
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<(), A::Error> {
        self.exactly()
            .for_each(|given| *given = FieldValue::Unclear);
        if !self.may_contain_wanted() {
            while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(());
        }
        let above = self.path.len();
        while let Some(name) = entries.next_key::<String>()? {
            if above > 0 {
                self.path.push('.');
            }
            if is_prototype(&name) {
                return Err(A::Error::custom(
                    "a parser may read it as the object's prototype",
                ));
            }
            // some parsers end a name at NUL
            let name = name.split(char::is_control).next().unwrap_or_default();
            self.path.push_str(name.trim());
            entries.next_value_seed(JsonPosition {
                fields: &mut *self.fields,
                path: &mut *self.path,
            })?;
            self.path.truncate(above);
        }
        Ok(())
    }
}
