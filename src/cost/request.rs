//! The parts of a request that determine its cost: the model, the output bound, the number of
//! choices and the prompt's length.
//!
//! Nothing is tokenised: a prompt counts by its bytes. One exception: a string whose first
//! [`MAX_ENCODED_BYTES`] bytes look like base64 counts as that many. It is a picture or a file,
//! whose tokens do not depend on its length.
//!
//! A field that appears twice with different values counts as absent. Otherwise clients could
//! exploit parsers that disagree, and lower their estimates.

use std::fmt;

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::counters::MAX_MODEL_BYTES;

/// Longer base64 strings count as this many bytes.
pub const MAX_ENCODED_BYTES: u64 = 4_096;

/// The most choices that can multiply the output.
pub const MAX_CHOICES: u64 = 128;

/// The inputs of an estimate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CostInputs {
    /// Bytes of the body, with base64 strings shortened.
    pub bytes: u64,
    /// The model named in the request.
    pub model: Option<String>,
    /// The output bound per choice, in tokens.
    pub max_output: Option<u64>,
    /// Requested choices: 1 to [`MAX_CHOICES`].
    pub choices: u64,
    /// Whether the request asks for a stream.
    pub is_stream: bool,
    /// Whether the request sets `stream_options`, which control usage reports.
    pub has_stream_options: bool,
}

impl CostInputs {
    /// The inputs for a body that is not read: only its length.
    pub fn of_length(bytes: u64) -> CostInputs {
        CostInputs {
            bytes,
            choices: 1,
            ..CostInputs::default()
        }
    }

    /// Reads a whole JSON body. If it is not JSON, only its length counts.
    pub fn read(body: &[u8]) -> CostInputs {
        let mut fields = RequestFields::default();
        let mut deserializer = serde_json::Deserializer::from_slice(body);
        let read = FieldsOf(&mut fields, Level::Top).deserialize(&mut deserializer);
        if read.is_err() || deserializer.end().is_err() {
            return CostInputs::of_length(body.len() as u64);
        }
        let (max_output, choices) = (fields.max_output(), fields.choices());
        let is_name = |name: &String| !name.is_empty() && name.len() <= MAX_MODEL_BYTES;
        CostInputs {
            bytes: prompt_bytes(body),
            model: fields.model.sole().filter(is_name),
            max_output,
            choices,
            is_stream: fields.stream.sole().unwrap_or(false),
            has_stream_options: fields.has_stream_options,
        }
    }
}

/// Counted bytes of a JSON body.
fn prompt_bytes(body: &[u8]) -> u64 {
    let is_encoded = |byte: &u8| byte.is_ascii_alphanumeric() || b"+/=_-:;,".contains(byte);
    let (mut counted, mut rest) = (body.len() as u64, body);
    while let Some(open) = memchr::memchr(b'"', rest) {
        let text = rest.get(open + 1..).unwrap_or_default();
        let length = text_length(text);
        let (text, tail) = text.split_at(length);
        rest = tail.get(1..).unwrap_or_default();
        let first = text.get(..MAX_ENCODED_BYTES as usize);
        if first.is_some_and(|first| first.iter().all(is_encoded)) {
            counted -= text.len() as u64 - MAX_ENCODED_BYTES;
        }
    }
    counted
}

/// Length up to the closing quote.
fn text_length(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(found) = text
        .get(at..)
        .and_then(|rest| memchr::memchr2(b'"', b'\\', rest))
    {
        at += found;
        if text.get(at) == Some(&b'"') {
            return at;
        }
        at += 2;
    }
    text.len()
}

/// No value, one value, or several different ones.
#[derive(Debug, Default)]
enum Occurrences<T> {
    #[default]
    None,
    One(T),
    Conflicting,
}

impl<T: PartialEq> Occurrences<T> {
    fn add(&mut self, value: T) {
        match self {
            Occurrences::None => *self = Occurrences::One(value),
            Occurrences::One(known) if *known == value => {}
            _ => *self = Occurrences::Conflicting,
        }
    }

    fn sole(self) -> Option<T> {
        match self {
            Occurrences::One(value) => Some(value),
            _ => None,
        }
    }
}

/// Names of the output bound; the first one present wins.
const MAX_OUTPUT: [&str; 6] = [
    "max_completion_tokens",
    "max_tokens",
    "max_output_tokens",
    "maxOutputTokens",
    "num_predict",
    "maxTokens",
];

/// Names for the number of choices.
const CHOICES: [&str; 3] = ["n", "candidateCount", "best_of"];

#[derive(Debug, Default)]
struct RequestFields {
    model: Occurrences<String>,
    stream: Occurrences<bool>,
    has_stream_options: bool,
    max_output: [Occurrences<u64>; 6],
    choices: [Occurrences<u64>; 3],
}

impl RequestFields {
    fn max_output(&self) -> Option<u64> {
        let is_conflicting = |given: &&Occurrences<u64>| matches!(given, Occurrences::Conflicting);
        if self.max_output.iter().any(|given| is_conflicting(&given)) {
            return None;
        }
        self.max_output.iter().find_map(|given| match given {
            Occurrences::One(most) if *most > 0 => Some(*most),
            _ => None,
        })
    }

    fn choices(&self) -> u64 {
        let asked = self.choices.iter().filter_map(|given| match given {
            Occurrences::One(count) if (1..=MAX_CHOICES).contains(count) => Some(*count),
            _ => None,
        });
        asked.max().unwrap_or(1)
    }
}

/// The kind of object being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Top,
    /// `generationConfig`, `options`, `inferenceConfig`.
    Nested,
}

impl Level {
    /// Whether objects of this level may have this name.
    fn has(self, name: &str) -> bool {
        let is_nested = matches!(
            name,
            "maxOutputTokens" | "num_predict" | "maxTokens" | "candidateCount"
        );
        is_nested == (self == Level::Nested)
    }
}

/// Reads the fields of an object.
struct FieldsOf<'a>(&'a mut RequestFields, Level);

impl<'de> DeserializeSeed<'de> for FieldsOf<'_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// Ignores values that are not objects.
macro_rules! ignored {
    ($($visit:ident: $kind:ty),*) => {
        $(fn $visit<E>(self, _: $kind) -> Result<(), E> {
            Ok(())
        })*
    };
}

impl<'de> Visitor<'de> for FieldsOf<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    ignored!(visit_bool: bool, visit_u64: u64, visit_i64: i64, visit_f64: f64, visit_str: &str);

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let FieldsOf(fields, level) = self;
        while let Some(name) = entries.next_key::<String>()? {
            let name = name.as_str();
            let bound = MAX_OUTPUT.iter().zip(&mut fields.max_output);
            let choices = CHOICES.iter().zip(&mut fields.choices);
            let mut counts = bound.chain(choices);
            let count = counts.find(|(known, _)| **known == name && level.has(name));
            if let Some((_, place)) = count {
                match entries.next_value_seed(Scalar)? {
                    GivenBound::Count(count) => place.add(count),
                    _ => place.add(0),
                }
                continue;
            }
            match (level, name) {
                (Level::Top, "generationConfig" | "options" | "inferenceConfig") => {
                    entries.next_value_seed(FieldsOf(fields, Level::Nested))?;
                }
                (Level::Top, "model") => match entries.next_value_seed(Scalar)? {
                    GivenBound::Text(model) => fields.model.add(model),
                    _ => fields.model.add(String::new()),
                },
                (Level::Top, "stream") => {
                    let value = entries.next_value_seed(Scalar)?;
                    fields.stream.add(value == GivenBound::Flag(true));
                }
                (Level::Top, "stream_options") => {
                    entries.next_value::<IgnoredAny>()?;
                    fields.has_stream_options = true;
                }
                _ => _ = entries.next_value::<IgnoredAny>()?,
            }
        }
        Ok(())
    }
}

/// The type and value of a single field.
#[derive(Debug, PartialEq, Eq)]
enum GivenBound {
    Count(u64),
    Text(String),
    Flag(bool),
    Other,
}

struct Scalar;

impl<'de> DeserializeSeed<'de> for Scalar {
    type Value = GivenBound;

    fn deserialize<D: serde::Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<GivenBound, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Scalar {
    type Value = GivenBound;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, flag: bool) -> Result<GivenBound, E> {
        Ok(GivenBound::Flag(flag))
    }

    fn visit_u64<E>(self, count: u64) -> Result<GivenBound, E> {
        Ok(GivenBound::Count(count))
    }

    fn visit_i64<E>(self, _: i64) -> Result<GivenBound, E> {
        Ok(GivenBound::Other)
    }

    fn visit_f64<E>(self, number: f64) -> Result<GivenBound, E> {
        // `4096.0` and `1e5` are whole numbers.
        let is_count = number.fract() == 0.0 && (0.0..1e15).contains(&number);
        Ok(match is_count {
            true => GivenBound::Count(number as u64),
            false => GivenBound::Other,
        })
    }

    fn visit_str<E>(self, text: &str) -> Result<GivenBound, E> {
        Ok(GivenBound::Text(text.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<GivenBound, E> {
        Ok(GivenBound::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<GivenBound, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(GivenBound::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<GivenBound, A::Error> {
        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(GivenBound::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> CostInputs {
        CostInputs::read(body.as_bytes())
    }

    #[test]
    fn each_provider_bounds_its_output_in_its_own_words() {
        for (body, most, choices) in [
            (r#"{"max_tokens":5}"#, Some(5), 1),
            (
                r#"{"max_tokens":5,"max_completion_tokens":7,"n":3}"#,
                Some(7),
                3,
            ),
            (r#"{"max_output_tokens":4096.0}"#, Some(4_096), 1),
            (
                r#"{"generationConfig":{"maxOutputTokens":9,"candidateCount":2}}"#,
                Some(9),
                2,
            ),
            (r#"{"options":{"num_predict":64}}"#, Some(64), 1),
            (r#"{"options":{"num_predict":-1}}"#, None, 1),
            (r#"{"inferenceConfig":{"maxTokens":1e3}}"#, Some(1_000), 1),
            (r#"{"n":2,"best_of":8}"#, None, 8),
            (r#"{"n":129}"#, None, 1),
            (r#"{"max_tokens":0,"max_output_tokens":"8"}"#, None, 1),
            (r#"{"maxTokens":9,"options":{"max_tokens":9}}"#, None, 1),
            (r#"{"messages":[{"max_tokens":9}]}"#, None, 1),
            ("[]", None, 1),
            ("7", None, 1),
        ] {
            let inputs = read(body);
            assert_eq!(
                (inputs.max_output, inputs.choices),
                (most, choices),
                "{body}"
            );
            assert_eq!(inputs.bytes, body.len() as u64);
        }
    }

    #[test]
    fn a_field_with_two_values_counts_as_absent() {
        assert_eq!(
            read(r#"{"max_tokens":5,"max_tokens":5}"#).max_output,
            Some(5)
        );
        for body in [
            r#"{"max_tokens":5,"max_tokens":6}"#,
            r#"{"max_tokens":5,"max_tokens":"6"}"#,
            r#"{"max_tokens":5,"max\u005ftokens":4096}"#,
            r#"{"max_tokens":5,"max_completion_tokens":1,"max_completion_tokens":9}"#,
            r#"{"options":{"num_predict":1},"options":{"num_predict":2}}"#,
        ] {
            assert_eq!(read(body).max_output, None, "{body}");
        }
        assert_eq!(read(r#"{"model":"a","model":"b"}"#).model, None);
        assert_eq!(read(r#"{"model":"a","model":1}"#).model, None);
    }

    #[test]
    fn the_model_and_the_wish_for_a_stream_are_read() {
        let inputs = read(r#"{"model":"gpt-4o","stream":true,"stream_options":null}"#);
        assert_eq!(inputs.model.as_deref(), Some("gpt-4o"));
        assert!(inputs.is_stream && inputs.has_stream_options);
        let inputs = read(r#"{"model":null,"stream":"true"}"#);
        assert!(!inputs.is_stream && !inputs.has_stream_options);
        assert_eq!(inputs.model, None);
    }

    #[test]
    fn a_body_that_is_not_json_counts_by_its_length() {
        for body in ["", "{", "model=gpt", r#"{"model":"a"} x"#, "\u{1}"] {
            assert_eq!(
                read(body),
                CostInputs::of_length(body.len() as u64),
                "{body}"
            );
        }
        let deep = "[".repeat(100_000);
        assert_eq!(read(&deep), CostInputs::of_length(100_000));
    }

    #[test]
    fn a_picture_counts_as_four_kib_and_prose_by_its_length() {
        let picture = format!("data:image/png;base64,{}", "iVBORw0K/+".repeat(10_000));
        let body = format!(r#"{{"a":"{picture}","b":"short"}}"#);
        let expected = body.len() - picture.len() + 4_096;
        assert_eq!(read(&body).bytes, expected as u64);
        let prose = "prose with spaces ".repeat(1_000);
        let body = format!(r#"{{"a":"{prose}\"","b":"{}"}}"#, "x".repeat(4_096));
        assert_eq!(read(&body).bytes, body.len() as u64);
    }
}
