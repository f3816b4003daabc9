//! A configuration as its author wrote it: to show it without secrets, and to compare two.

use std::{collections::BTreeMap, path::PathBuf};

use serde_json::{Map, Value, json};
use toml::de::{DeTable, DeValue};

/// A configuration as written: the text of its file, and hashes of the other files it read.
#[derive(Clone, Debug, Default)]
pub struct WrittenConfig {
    /// The file as JSON, with `${NAME}` unexpanded.
    pub tables: Value,
    /// Path to a hash of the file's bytes.
    pub files: BTreeMap<PathBuf, String>,
}

impl WrittenConfig {
    pub(super) fn new(tables: &DeTable<'_>) -> WrittenConfig {
        WrittenConfig {
            tables: table(tables),
            files: BTreeMap::new(),
        }
    }

    /// The tables without passwords in URLs. Other secrets are in files and in the environment,
    /// and only their names appear here.
    pub fn redacted(&self) -> Value {
        redacted(&self.tables)
    }
}

fn redacted(shown: &Value) -> Value {
    match shown {
        Value::String(text) => json!(without_password(text)),
        Value::Array(items) => items.iter().map(redacted).collect(),
        Value::Object(items) => {
            let item = |(name, item): (&String, &Value)| (name.clone(), redacted(item));
            Value::Object(items.iter().map(item).collect())
        }
        other => other.clone(),
    }
}

/// Turns `redis://user:secret@host` into `redis://***@host`, and `https://host/keys?access=secret`
/// into `https://host/keys?***`.
fn without_password(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else {
        return text.to_owned();
    };
    let authority = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let until = rest[..authority].rfind('@').or_else(|| rest.rfind('@'));
    let shown = until.map_or(rest.to_owned(), |at| format!("***{}", &rest[at..]));
    let shown = match shown.split_once('?') {
        Some((path, _)) => format!("{path}?***"),
        None => shown,
    };
    format!("{scheme}://{shown}")
}

fn table(table: &DeTable<'_>) -> Value {
    let entry = |(name, item): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
        let name: &std::borrow::Cow<'_, str> = name.get_ref();
        (name.to_string(), value(item.get_ref()))
    };
    Value::Object(table.iter().map(entry).collect::<Map<_, _>>())
}

fn value(item: &DeValue<'_>) -> Value {
    match item {
        DeValue::String(text) => json!(text),
        DeValue::Integer(number) => {
            let parsed = i64::from_str_radix(number.as_str(), number.radix());
            parsed.map_or_else(|_| json!(number.to_string()), |number| json!(number))
        }
        DeValue::Float(number) => {
            let parsed = number.as_str().parse::<f64>();
            parsed.map_or_else(|_| json!(number.to_string()), |number| json!(number))
        }
        DeValue::Boolean(yes) => json!(yes),
        DeValue::Datetime(date) => json!(date.to_string()),
        DeValue::Array(items) => items.iter().map(|item| value(item.get_ref())).collect(),
        DeValue::Table(items) => table(items),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_in_addresses_are_not_shown() {
        let shown = |text: &str| without_password(text);
        assert_eq!(
            shown("redis://u:s3cret@host:6379/0"),
            "redis://***@host:6379/0"
        );
        assert_eq!(shown("rediss://:s3/cret@host"), "rediss://***@host");
        assert_eq!(
            shown("${URL:-redis://:s3cret@host}"),
            "${URL:-redis://***@host}"
        );
        assert_eq!(shown("http://10.0.0.1:9000"), "http://10.0.0.1:9000");
        assert_eq!(
            shown("https://id/keys?access=s3cret"),
            "https://id/keys?***"
        );
        assert_eq!(shown("unix:/run/app.sock"), "unix:/run/app.sock");
    }
}
