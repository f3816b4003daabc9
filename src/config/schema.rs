//! The JSON Schema of the configuration file, made from the records of its keys.
//!
//! The schema must never refuse what `tidegate check` accepts. It is draft-07 because editors of
//! TOML know no later draft; its keywords mean the same in draft 2020-12.

use serde::{Serialize, Serializer, ser::SerializeMap as _};
use serde_json::json;

use super::{
    keys::{self, DefaultValue, KeyRecord, Keys, ValueKind},
    units,
};

const DRAFT: &str = "http://json-schema.org/draft-07/schema#";
const DOCUMENTATION: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/docs/config.md");

/// Any text may contain environment variables, whose values are unknown here.
const VARIABLE: &str = r"\$\{";

/// The JSON Schema, as text with a final line break.
pub fn json_schema() -> String {
    let mut root = vec![
        ("$schema", json!(DRAFT).into()),
        ("title", json!("tidegate configuration").into()),
    ];
    let about = format!(
        "The configuration file of tidegate. This schema knows names, types and ranges; `tidegate \
         check` finds more errors. {DOCUMENTATION}"
    );
    root.extend(table(&keys::FILE, about));
    let text = serde_json::to_string_pretty(&SchemaNode::Object(root));
    // no value of the schema can fail to serialise
    text.unwrap_or_default() + "\n"
}

/// A part of the schema. Objects keep the order of their members, for editors.
enum SchemaNode {
    Leaf(serde_json::Value),
    List(Vec<SchemaNode>),
    Object(Members),
}

type Members = Vec<(&'static str, SchemaNode)>;

impl From<serde_json::Value> for SchemaNode {
    fn from(value: serde_json::Value) -> Self {
        Self::Leaf(value)
    }
}

impl Serialize for SchemaNode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Leaf(value) => value.serialize(serializer),
            Self::List(nodes) => nodes.serialize(serializer),
            Self::Object(members) => {
                let mut map = serializer.serialize_map(Some(members.len()))?;
                for (name, node) in members {
                    map.serialize_entry(name, node)?;
                }
                map.end()
            }
        }
    }
}

/// The schema of a table. It allows only known keys.
fn table(keys: &'static Keys, about: String) -> Members {
    let properties = keys
        .keys
        .iter()
        .map(|record| (record.name, key(record, keys)));
    let is_required = |record: &&KeyRecord| matches!(record.default, DefaultValue::Required);
    let required: Vec<&str> = keys
        .keys
        .iter()
        .filter(is_required)
        .map(|record| record.name)
        .collect();
    vec![
        ("description", json!(about).into()),
        ("type", json!("object").into()),
        ("properties", SchemaNode::Object(properties.collect())),
        ("required", json!(required).into()),
        ("additionalProperties", json!(false).into()),
        ("x-tombi-table-keys-order", json!("schema").into()),
    ]
}

/// The schema of a key: its type, its description and its default.
fn key(record: &'static KeyRecord, table: &Keys) -> SchemaNode {
    let mut members = vec![("description", json!(description(record, table)).into())];
    let described = |(name, _): &(&str, SchemaNode)| *name != "description";
    members.extend(kind(&record.kind).into_iter().filter(described));
    let default = record.default_text().and_then(|text| {
        // the text of a number may have `_`; all else is JSON already
        let number = text.replace('_', "");
        let json = serde_json::from_str(text);
        json.or_else(|_| serde_json::from_str(&number)).ok()
    });
    members.extend(default.map(|default: serde_json::Value| ("default", default.into())));
    SchemaNode::Object(members)
}

fn description(record: &KeyRecord, table: &Keys) -> String {
    let default = match record.default {
        DefaultValue::Required => ". Required".to_owned(),
        DefaultValue::Value(text) => format!(". Default: {text}"),
        DefaultValue::Note("") => String::new(),
        DefaultValue::Note(text) => format!(". Default: {text}"),
    };
    let text = format!("{}: {}{default}.", record.type_text(), record.doc);
    let title = match record.kind {
        ValueKind::Table(keys) | ValueKind::Named(keys) => keys.title,
        ValueKind::Tables([keys]) => keys.title,
        _ => table.title,
    };
    format!("{} {DOCUMENTATION}#{}", without_links(&text), anchor(title))
}

/// The type of a value.
fn kind(kind: &'static ValueKind) -> Members {
    let of_type = |name: &str| vec![("type", json!(name).into())];
    let pattern = |pattern: String| {
        let pattern = json!(format!("^{pattern}$|{VARIABLE}"));
        vec![
            ("type", json!("string").into()),
            ("pattern", pattern.into()),
        ]
    };
    let number = "[0-9][0-9_]*";
    let time = units::TIME_UNITS.map(|(name, _)| name).join("|");
    match kind {
        ValueKind::Boolean => of_type("boolean"),
        ValueKind::Integer(least, most) => range("integer", json!(least), json!(most)),
        ValueKind::Share(least, most) => range("number", parts_of_one(*least), parts_of_one(*most)),
        ValueKind::Decimal(least, most) => any_of([
            SchemaNode::Object(range("number", nanos(*least), nanos(*most))),
            SchemaNode::Object(pattern(format!(r"{number}(\.[0-9]+)?"))),
        ]),
        ValueKind::Duration(..) => pattern(format!("{number}({time})")),
        ValueKind::Size(..) => {
            let sizes = units::SIZE_UNITS.map(|(name, _)| name).join("|");
            pattern(format!("{number}({sizes})"))
        }
        ValueKind::Rate => pattern(format!(
            r"{number}(\.[0-9]+ [^ /]+| [^ /]+)?/({number})?({time}|month)"
        )),
        ValueKind::Date => any_of(
            ["date", "date-time"]
                .map(|format| SchemaNode::from(json!({ "type": "string", "format": format }))),
        ),
        ValueKind::Text(_) => of_type("string"),
        ValueKind::Choice(words) => any_of([
            json!({ "enum": words }).into(),
            json!({ "type": "string", "pattern": VARIABLE }).into(),
        ]),
        ValueKind::List(_, item) => list(SchemaNode::Object(self::kind(item))),
        ValueKind::ByTier(value) => any_of([
            SchemaNode::Object(self::kind(value)),
            named(SchemaNode::Object(self::kind(value))),
        ]),
        ValueKind::OneOf(kinds) => any_of(
            kinds
                .iter()
                .map(|kind| SchemaNode::Object(self::kind(kind))),
        ),
        ValueKind::Table(keys) => table(keys, keys.title.to_owned()),
        ValueKind::Tables([keys]) => list(titled(keys)),
        ValueKind::Tables(tables) => {
            let tables = tables.iter().map(|keys| titled(keys));
            list(SchemaNode::Object(any_of(tables)))
        }
        ValueKind::ByName(value) => match named(SchemaNode::Object(self::kind(value))) {
            SchemaNode::Object(members) => members,
            _ => Vec::new(),
        },
        ValueKind::Named(keys) => match named(titled(keys)) {
            SchemaNode::Object(members) => members,
            _ => Vec::new(),
        },
    }
}

fn titled(keys: &'static Keys) -> SchemaNode {
    SchemaNode::Object(table(keys, keys.title.to_owned()))
}

fn range(name: &str, least: serde_json::Value, most: serde_json::Value) -> Members {
    vec![
        ("type", json!(name).into()),
        ("minimum", least.into()),
        ("maximum", most.into()),
    ]
}

fn parts_of_one(ppm: u32) -> serde_json::Value {
    match ppm {
        0 => json!(0),
        1_000_000 => json!(1),
        ppm => json!(f64::from(ppm) / 1e6),
    }
}

/// A decimal in units of 10⁻⁹.
fn nanos(nanos: u64) -> serde_json::Value {
    match nanos % 1_000_000_000 {
        0 => json!(nanos / 1_000_000_000),
        _ => json!(nanos as f64 / 1e9),
    }
}

fn any_of(nodes: impl IntoIterator<Item = SchemaNode>) -> Members {
    vec![("anyOf", SchemaNode::List(nodes.into_iter().collect()))]
}

fn list(item: SchemaNode) -> Members {
    vec![("type", json!("array").into()), ("items", item)]
}

/// A table whose keys are names.
fn named(value: SchemaNode) -> SchemaNode {
    SchemaNode::Object(vec![
        ("type", json!("object").into()),
        ("additionalProperties", value),
    ])
}

/// The text of Markdown links, without their targets.
fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("](") {
        let Some(((start, words), (_, end))) = before.rsplit_once('[').zip(after.split_once(')'))
        else {
            break;
        };
        plain.extend([start, words]);
        rest = end;
    }
    plain + rest
}

/// The anchor of a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let kept = heading.chars().filter(kept);
    kept.map(|c| {
        if c == ' ' {
            '-'
        } else {
            c.to_ascii_lowercase()
        }
    })
    .collect()
}
