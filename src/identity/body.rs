//! The fields of a request's body that key a limit: JSON and forms.
//!
//! One pass over the body; only the wanted fields are kept, each folded as `text` says, so that `body:username`
//! is the same bucket whether it comes as JSON or as a form. What two parsers could read differently never gives a bucket
//! of its own choice: a field that stands twice with different values, an array or an object where text is expected,
//! and JSON that is malformed (which a lenient upstream may take all the same) are `Given::Unclear`, one value for all.
//!
//! A body of any other type has no fields, so the limit's `missing` decides.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::text::{Given, pairs, same};

/// The wanted fields of one body. Its `Debug` form names them without their values, which may be secret.
#[derive(Default, PartialEq, Eq)]
pub struct BodyFields(Vec<(String, Given)>);

impl fmt::Debug for BodyFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set()
            .entries(self.0.iter().map(|(name, _)| name))
            .finish()
    }
}

/// How a body is written.
enum Form {
    Json,
    UrlEncoded,
    Other,
}

impl BodyFields {
    /// Reads `wanted` fields from a whole body. Never fails: what cannot be read is absent or unclear, as above.
    ///
    /// `application/json` and `…+json` (RFC 6839 §3.1): text, numbers and booleans, as they would be written; `null` says
    /// nothing; `a.b` is the field `b` of the object `a`, or one that is called `a.b`.
    /// `application/x-www-form-urlencoded`: the form's field. Parameters of the type are ignored. Time is linear in the body
    /// for each wanted field; memory is bounded by the body.
    pub fn parse<S: AsRef<str>>(
        content_type: Option<&str>,
        bytes: &[u8],
        wanted: &[S],
    ) -> BodyFields {
        let nothing = |name: &S| (name.as_ref().to_owned(), Given::Nothing);
        let mut fields: Vec<_> = wanted.iter().map(nothing).collect();
        match form(content_type) {
            Form::Json => json(bytes, &mut fields),
            Form::UrlEncoded => {
                for (found, value) in pairs(bytes) {
                    let wanted = fields.iter_mut().filter(|(name, _)| same(name, &found));
                    wanted.for_each(|(_, given)| given.add(&value));
                }
            }
            Form::Other => {}
        }
        BodyFields(fields)
    }

    /// Whether a body of this type has fields. One that has none needs not be read for them.
    pub fn may_be_in(content_type: Option<&str>) -> bool {
        !matches!(form(content_type), Form::Other)
    }

    /// What the body says about a field, by the name under which it was wanted.
    pub(super) fn get(&self, name: &str) -> Option<&Given> {
        self.0
            .iter()
            .find(|(wanted, _)| wanted == name)
            .map(|(_, given)| given)
    }
}

fn form(content_type: Option<&str>) -> Form {
    let whole = content_type.unwrap_or_default();
    let kind = whole.split([';', ',']).next().unwrap_or_default().trim();
    let kind = kind.to_ascii_lowercase();
    match kind.as_str() {
        "application/x-www-form-urlencoded" => Form::UrlEncoded,
        "application/json" | "text/json" => Form::Json,
        other if other.ends_with("+json") => Form::Json,
        _ => Form::Other,
    }
}

fn json(bytes: &[u8], fields: &mut [(String, Given)]) {
    // RFC 8259 §8.1: a parser may ignore a byte order mark
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    if text.trim_ascii().is_empty() {
        return;
    }
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let mut path = String::new();
    let here = Here {
        fields: &mut *fields,
        path: &mut path,
    };
    let read = here.deserialize(&mut deserializer);
    if read.and_then(|()| deserializer.end()).is_err() {
        fields
            .iter_mut()
            .for_each(|(_, given)| *given = Given::Unclear);
    }
}

/// One value of a JSON text, and the names on the way to it, joined by dots.
struct Here<'f> {
    fields: &'f mut [(String, Given)],
    path: &'f mut String,
}

impl Here<'_> {
    /// The fields that this value stands for.
    fn exactly(&mut self) -> impl Iterator<Item = &mut Given> {
        let path = &*self.path;
        let wanted = self.fields.iter_mut();
        wanted.filter_map(move |(name, given)| same(name, path).then_some(given))
    }

    /// Whether a wanted field may stand somewhere inside this value.
    fn is_on_the_way(&self) -> bool {
        self.fields.iter().any(|(name, _)| leads(self.path, name))
    }

    fn text(mut self, text: &str) {
        self.exactly().for_each(|given| given.add(text));
    }
}

/// Whether `name` is inside `path`; everything is inside the whole text.
fn leads(path: &str, name: &str) -> bool {
    let dots = name.match_indices('.');
    path.is_empty() || dots.into_iter().any(|(dot, _)| same(&name[..dot], path))
}

impl<'de> DeserializeSeed<'de> for Here<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Here<'_> {
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
        self.text(&value.to_string());
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.text(&value.to_string());
        Ok(())
    }

    /// `1.0`, `10e-1` and `1` are one number; so are those that no double tells apart.
    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.text(&if value == 0.0 { 0.0 } else { value }.to_string());
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        self.text(value);
        Ok(())
    }

    /// Some upstreams take the first item of a list, or look into it: what they find there is not for us to guess.
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        for (name, given) in &mut *self.fields {
            if same(name, self.path) || leads(self.path, name) {
                *given = Given::Unclear;
            }
        }
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<(), A::Error> {
        self.exactly().for_each(|given| *given = Given::Unclear);
        if !self.is_on_the_way() {
            while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(());
        }
        let above = self.path.len();
        while let Some(name) = entries.next_key::<String>()? {
            if above > 0 {
                self.path.push('.');
            }
            self.path.push_str(name.trim());
            entries.next_value_seed(Here {
                fields: &mut *self.fields,
                path: &mut *self.path,
            })?;
            self.path.truncate(above);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const JSON: Option<&str> = Some("application/json");
    const FORM: Option<&str> = Some("application/x-www-form-urlencoded");

    fn field(content_type: Option<&str>, body: &str, name: &str) -> Given {
        let fields = BodyFields::parse(content_type, body.as_bytes(), &[name]);
        fields.get(name).expect("it was wanted").clone()
    }

    fn text(text: &str) -> Given {
        Given::Text(text.to_owned())
    }

    #[test]
    fn one_name_is_one_value_however_it_is_sent() {
        for body in [
            r#"{"username":"alice"}"#,
            r#"{"username":" Alice\t"}"#,
            r#"{"\u0075sername":"\u0061lice"}"#,
            r#"{"UserName":"alice"}"#,
            r#"{"u\u017fername":"alice"}"#,
            r#"{"password":{"username":"x"},"username":"alice"}"#,
            r#"{"username":"alice","username":"ALICE"}"#,
            r#"{"username":null,"username":"alice"}"#,
            "\u{feff}{\"username\":\"alice\"}\n",
        ] {
            assert_eq!(field(JSON, body, "username"), text("alice"), "{body}");
        }
        for body in [
            "username=alice",
            "a=b&%75sername=+Alice",
            "username=alice&username=",
        ] {
            assert_eq!(field(FORM, body, "username"), text("alice"), "{body}");
        }
    }

    #[test]
    fn numbers_and_booleans_are_what_they_would_be_written_as() {
        for (json, value) in [
            ("1", "1"),
            ("1.0", "1"),
            ("10e-1", "1"),
            ("-0.0", "0"),
            ("-7", "-7"),
            ("true", "true"),
            ("\"1\"", "1"),
        ] {
            let body = format!("{{\"id\":{json}}}");
            assert_eq!(field(JSON, &body, "id"), text(value), "{body}");
        }
    }

    #[test]
    fn what_parsers_read_differently_is_one_value_for_all() {
        for body in [
            r#"{"username":"alice","username":"x1"}"#,
            r#"{"username":"x1","USERNAME":"alice"}"#,
            r#"{"username":["alice"]}"#,
            r#"{"username":{"$ne":null}}"#,
            r#"[{"username":"alice"}]"#,
            r#"{"username":"alice",}"#,
            r#"{"username":"alice"} {"username":"x1"}"#,
            r#"{"username":"\ud800"}"#,
            r#"{"username":1e999}"#,
            r#"{'username':'alice'}"#,
            &("[".repeat(100_000) + "]"),
        ] {
            assert_eq!(field(JSON, body, "username"), Given::Unclear, "{body:.40}");
        }
        let twice = field(FORM, "username=alice&username=x1", "username");
        assert_eq!(twice, Given::Unclear);
    }

    #[test]
    fn what_is_not_there_is_absent() {
        for body in [
            "",
            " \n",
            "{}",
            "null",
            "7",
            r#"{"username":null}"#,
            r#"{"username":" "}"#,
            r#"{"a":"username"}"#,
        ] {
            assert_eq!(field(JSON, body, "username"), Given::Nothing, "{body}");
        }
        for content_type in [
            None,
            Some(""),
            Some("text/plain"),
            Some("multipart/form-data; boundary=x"),
        ] {
            let body = "username=alice";
            assert_eq!(field(content_type, body, "username"), Given::Nothing);
        }
    }

    #[test]
    fn type_is_compared_without_its_parameters_and_case() {
        for content_type in [
            "Application/JSON; charset=utf-8",
            "application/vnd.api+json",
            " application/json,text/plain",
        ] {
            let given = field(Some(content_type), r#"{"a":"b"}"#, "a");
            assert_eq!(given, text("b"), "{content_type}");
        }
    }

    #[test]
    fn a_dot_leads_into_an_object() {
        for body in [
            r#"{"user":{"name":"alice"}}"#,
            r#"{"user.name":"alice"}"#,
            r#"{"USER":{"x":1,"Name":"alice"},"name":"x"}"#,
            r#"{"user":{"name":"alice"},"user":{"other":1}}"#,
        ] {
            assert_eq!(field(JSON, body, "user.name"), text("alice"), "{body}");
        }
        for body in [
            r#"{"user":{"name":"alice"},"user.name":"x1"}"#,
            r#"{"user":[{"name":"alice"}]}"#,
        ] {
            assert_eq!(field(JSON, body, "user.name"), Given::Unclear, "{body}");
        }
        for body in [
            r#"{"user":"alice"}"#,
            r#"{"name":"alice"}"#,
            r#"{"user":{"user":{"name":"alice"}}}"#,
        ] {
            assert_eq!(field(JSON, body, "user.name"), Given::Nothing, "{body}");
        }
        let body = br#"{"user":{"name":"alice"},"id":1}"#;
        let both = BodyFields::parse(JSON, body, &["user.name", "id", "user"]);
        let all: Vec<_> = ["user.name", "id", "user"]
            .map(|name| both.get(name))
            .into();
        assert_eq!(
            all,
            [
                Some(&text("alice")),
                Some(&text("1")),
                Some(&Given::Unclear)
            ]
        );
    }

    #[test]
    fn debug_form_hides_the_values() {
        let fields = BodyFields::parse(FORM, b"password=hunter2", &["password"]);
        assert_eq!(format!("{fields:?}"), r#"{"password"}"#);
    }

    proptest! {
        #[test]
        fn no_body_makes_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            BodyFields::parse(JSON, &bytes, &["a.b", "a"]);
            BodyFields::parse(FORM, &bytes, &["a.b", "a"]);
        }

        #[test]
        fn no_text_like_json_makes_it_panic(text in "[\\[\\]{}\",:ab.0-9\\\\u ]{0,40}") {
            BodyFields::parse(JSON, text.as_bytes(), &["a.b", "a"]);
        }
    }
}
