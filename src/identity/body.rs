//! Body fields that are part of a limit's key: JSON and forms.
//!
//! One pass over the body keeps only the wanted fields, each folded by `text`. So `body:username`
//! selects the same bucket whether the body is JSON or a form.
//!
//! tidegate cannot know how the upstream parses a body. So every field that some parser reads as
//! the wanted one counts as an occurrence. Occurrences that differ become `FieldValue::Unclear`,
//! one shared value.
//!
//! A body is unclear as a whole if parsers would disagree about all of it:
//! - its content type is missing, repeated or not one of those below,
//! - it is compressed,
//! - its charset is not UTF-8,
//! - it breaks the strict grammar of its format.
//!
//! docs/body-keys.md lists the parsers and inputs that were tested.

mod form;
mod json;
mod multipart;
mod names;

use std::fmt;

use http::{
    HeaderMap,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
};

use super::text::FieldValue;

/// The wanted fields of one body.
#[derive(Debug, PartialEq, Eq)]
pub struct BodyFields(FieldValues);

#[derive(PartialEq, Eq)]
enum FieldValues {
    Read(Vec<(String, FieldValue)>),
    /// Every wanted field is unclear.
    Unclear,
}

/// Shows field names only; the values may be secret.
impl fmt::Debug for FieldValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FieldValues::Read(fields) => f
                .debug_set()
                .entries(fields.iter().map(|(name, _)| name))
                .finish(),
            FieldValues::Unclear => f.write_str("Unclear"),
        }
    }
}

/// The format of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BodyFormat {
    /// `application/json`, `text/json` and `…+json` (RFC 6839 §3.1). Strings, numbers and booleans
    /// count by their text; `null` is no value. `a.b` is field `b` of object `a`, or a field named
    /// `a.b`.
    Json,
    /// `application/x-www-form-urlencoded`: a form field.
    Form,
    /// `multipart/form-data` with this boundary: a form field.
    Multipart(String),
    /// Parsers disagree about it.
    Unclear,
}

impl BodyFormat {
    /// Reads the format from the request headers. An unclear body need not be read.
    pub fn of(headers: &HeaderMap) -> BodyFormat {
        let mut kinds = headers.get_all(CONTENT_TYPE).iter();
        let kind = kinds.next().and_then(|kind| kind.to_str().ok());
        let is_plain = |coding: &http::HeaderValue| {
            let coding = coding.as_bytes().trim_ascii();
            coding.is_empty() || coding.eq_ignore_ascii_case(b"identity")
        };
        let is_coded = !headers.get_all(CONTENT_ENCODING).iter().all(is_plain);
        match kind {
            Some(kind) if kinds.next().is_none() && !is_coded => BodyFormat::of_type(kind),
            _ => BodyFormat::Unclear,
        }
    }

    fn of_type(content_type: &str) -> BodyFormat {
        let (kind, parameters) = match content_type.split_once(';') {
            Some((kind, parameters)) => (kind, Some(parameters)),
            None => (content_type, None),
        };
        let kind = kind.trim_matches([' ', '\t']).to_ascii_lowercase();
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"/+-._".contains(&byte);
        if !kind.bytes().all(is_name) {
            return BodyFormat::Unclear;
        }
        let is_utf8 = parameters.is_none_or(are_harmless);
        match kind.as_str() {
            "multipart/form-data" => multipart::boundary(parameters.unwrap_or_default())
                .map_or(BodyFormat::Unclear, BodyFormat::Multipart),
            _ if !is_utf8 => BodyFormat::Unclear,
            "application/x-www-form-urlencoded" => BodyFormat::Form,
            "application/json" | "text/json" => BodyFormat::Json,
            other if other.ends_with("+json") => BodyFormat::Json,
            _ => BodyFormat::Unclear,
        }
    }

    /// Reads the `wanted` fields from a complete body. Never fails: an unreadable body is unclear,
    /// an empty body has no values. Time is linear in the body for each wanted field; memory is
    /// bounded by the body.
    pub fn read<S: AsRef<str>>(&self, bytes: &[u8], wanted: &[S]) -> BodyFields {
        let nothing = |name: &S| (name.as_ref().to_owned(), FieldValue::Nothing);
        let mut fields: Vec<_> = wanted.iter().map(nothing).collect();
        if bytes.trim_ascii().is_empty() {
            return BodyFields(FieldValues::Read(fields));
        }
        let read = match self {
            BodyFormat::Json => json::read(bytes, &mut fields),
            BodyFormat::Form => form::read(bytes, &mut fields),
            BodyFormat::Multipart(boundary) => multipart::read(bytes, boundary, &mut fields),
            BodyFormat::Unclear => None,
        };
        match read {
            Some(()) => BodyFields(FieldValues::Read(fields)),
            None => BodyFields::unclear(),
        }
    }
}

impl BodyFields {
    /// Reads the `wanted` fields from a complete body of this type ([`BodyFormat::read`]).
    pub fn parse<S: AsRef<str>>(
        content_type: Option<&str>,
        bytes: &[u8],
        wanted: &[S],
    ) -> BodyFields {
        content_type
            .map_or(BodyFormat::Unclear, BodyFormat::of_type)
            .read(bytes, wanted)
    }

    /// The fields of a body that was not read completely: all unclear.
    pub fn unclear() -> BodyFields {
        BodyFields(FieldValues::Unclear)
    }

    /// The value of a wanted field.
    pub(super) fn get(&self, name: &str) -> FieldValue {
        match &self.0 {
            FieldValues::Unclear => FieldValue::Unclear,
            FieldValues::Read(fields) => fields
                .iter()
                .find(|(wanted, _)| wanted == name)
                .map_or(FieldValue::Nothing, |(_, given)| given.clone()),
        }
    }
}

/// Whether the content type's parameters leave no doubt that the text is UTF-8.
fn are_harmless(parameters: &str) -> bool {
    let mut charsets = 0;
    parameters.split(';').all(|parameter| {
        let parameter = parameter.trim_matches([' ', '\t']).to_ascii_lowercase();
        match parameter.as_str() {
            "charset=utf-8" | "charset=\"utf-8\"" | "charset=utf8" => {
                charsets += 1;
                charsets == 1
            }
            other => !other.contains("charset"),
        }
    })
}

#[cfg(test)]
mod tests;
