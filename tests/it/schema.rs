//! `tidegate schema` prints a JSON Schema that accepts what `check` accepts, and refuses keys that do not exist.
//!
//! The validator here knows the keywords that the schema uses, and stops at any other.

use std::{fs, path::PathBuf};

use serde_json::{Map, Value, json};

use crate::support::tidegate;

/// The schema, as the command prints it.
fn schema() -> Value {
    let printed = tidegate(&std::env::temp_dir(), &["schema"]);
    assert_eq!((printed.code, printed.stderr.as_str()), (Some(0), ""));
    serde_json::from_str(&printed.stdout).expect("it is JSON")
}

/// Why `value` at `path` does not match, if it does not.
fn fault(schema: &Value, value: &Value, path: &str) -> Option<String> {
    let rules = schema.as_object().expect("a schema is an object");
    rules
        .iter()
        .find_map(|(name, rule)| broken(rules, name, rule, value, path))
}

fn broken(
    rules: &Map<String, Value>,
    name: &str,
    rule: &Value,
    value: &Value,
    path: &str,
) -> Option<String> {
    let fault_if = |is_fault: bool| is_fault.then(|| format!("{path} {value}: {name} {rule}"));
    let number = value.as_f64();
    match name {
        "$schema" | "title" | "description" | "default" | "format" | "x-tombi-table-keys-order" => {
            None
        }
        "type" => fault_if(!match rule.as_str().expect("one type") {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_u64() || value.is_i64(),
            "number" => value.is_number(),
            other => panic!("unknown type {other}"),
        }),
        "enum" => fault_if(!rule.as_array().expect("a list").contains(value)),
        "minimum" => fault_if(number.is_some_and(|number| Some(number) < rule.as_f64())),
        "maximum" => fault_if(number.is_some_and(|number| Some(number) > rule.as_f64())),
        "pattern" => {
            let pattern =
                regex_lite::Regex::new(rule.as_str().expect("a text")).expect("a pattern");
            fault_if(value.as_str().is_some_and(|text| !pattern.is_match(text)))
        }
        "required" => {
            let mut required = rule
                .as_array()
                .expect("a list")
                .iter()
                .filter_map(Value::as_str);
            fault_if(value.is_object() && !required.all(|key| value.get(key).is_some()))
        }
        "items" => {
            let items = value.as_array().into_iter().flatten().enumerate();
            items
                .into_iter()
                .find_map(|(at, item)| fault(rule, item, &format!("{path}[{at}]")))
        }
        "anyOf" => {
            let faults = rule.as_array().expect("a list").iter();
            let faults: Option<Vec<String>> = faults.map(|rule| fault(rule, value, path)).collect();
            faults.map(|faults| faults.join("\n"))
        }
        "properties" | "additionalProperties" => {
            let known = rules.get("properties").and_then(Value::as_object);
            let rule_of = |key: &str| match known.and_then(|known| known.get(key)) {
                Some(rule) => (name == "properties").then_some(rule),
                None => (name == "additionalProperties").then_some(rule),
            };
            value
                .as_object()
                .into_iter()
                .flatten()
                .find_map(|(key, value)| match rule_of(key)? {
                    Value::Bool(false) => Some(format!("{path}.{key} is not a key")),
                    rule => fault(rule, value, &format!("{path}.{key}")),
                })
        }
        other => panic!("unknown keyword {other}"),
    }
}

/// The JSON of a TOML value, as editors show it to a schema: dates are texts.
fn as_json(value: &toml::Value) -> Value {
    match value {
        toml::Value::String(text) => json!(text),
        toml::Value::Integer(number) => json!(number),
        toml::Value::Float(number) => json!(number),
        toml::Value::Boolean(flag) => json!(flag),
        toml::Value::Datetime(date) => json!(date.to_string()),
        toml::Value::Array(items) => items.iter().map(as_json).collect(),
        toml::Value::Table(table) => Value::Object(
            table
                .iter()
                .map(|(key, value)| (key.clone(), as_json(value)))
                .collect(),
        ),
    }
}

fn parsed(text: &str) -> Value {
    let table: toml::Table = toml::from_str(text).expect("it is TOML");
    as_json(&toml::Value::Table(table))
}

/// Every configuration of this repository that `check` accepts, with its origin.
fn configurations() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let folders = [
        "docs",
        "docs/decisions",
        ".",
        "tests/config/valid",
        "src/cli/presets",
        "load/config",
    ];
    for folder in folders {
        let entries = fs::read_dir(folder).expect("the folder is there");
        let mut files: Vec<PathBuf> = entries
            .map(|entry| entry.expect("it can be listed").path())
            .collect();
        files.sort();
        for path in files.iter().filter(|path| path.is_file()) {
            let name = path.display().to_string();
            let text = || fs::read_to_string(path).expect("it can be read");
            if name.ends_with(".md") {
                let page = text();
                let blocks = page.split("```toml\n").skip(1);
                let blocks = blocks.filter_map(|rest| rest.split("```").next());
                found.extend(blocks.map(|block| (name.clone(), block.to_owned())));
            } else if name.ends_with(".toml.example")
                || name.ends_with(".toml") && folder != "." && !name.ends_with("keys.toml")
            {
                found.push((name.clone(), text()));
            }
        }
    }
    found
}

#[test]
fn the_schema_accepts_every_configuration_of_docs_examples_and_tests() {
    let schema = schema();
    let configurations = configurations();
    assert!(
        configurations.len() >= 25,
        "only {} were found",
        configurations.len()
    );
    for (name, text) in configurations {
        if let Some(fault) = fault(&schema, &parsed(&text), "") {
            panic!("{name}: {fault}\nin:\n{text}");
        }
    }
}

#[test]
fn the_schema_refuses_misspelt_keys_and_values_that_cannot_be() {
    let schema = schema();
    let least = "upstream.api.servers = [\"builtin:echo\"]\n\
                 route = [{ name = \"all\", path = \"/{*rest}\", upstream = \"api\" }]\n";
    let refuses = |line: &str| fault(&schema, &parsed(&format!("{least}{line}")), "").is_some();
    assert!(!refuses(""));
    for line in [
        "sever.workers = 1",
        "server.worker = 1",
        "server.workers = 0",
        "server.workers = \"automatic\"",
        "server.drain_delay = \"10\"",
        "server.drain_delay = 10",
        "server.watch_config = \"yes\"",
        "upstream.b.balance = \"random\"",
        "upstream.b.server = []",
        "upstream.b = { servers = [], health = { path = \"/\", every = \"1s\" } }",
        "limit.a = { rate = \"1/s\" }",
        "limit.a = { key = [], rate = \"1 per second\" }",
        "limit.a = { key = [], rate = { default = \"1/s\", pro = 5 } }",
        "limit.a = { key = [], count_status = [\"404\"] }",
        "limit.a = { key = [], warn_at = 1.5 }",
        "limit.a = { key = [], cost = \"usage\" }",
        "user = [{ from = \"header\", keys_file = \"a\" }]",
        "listen = { address = \"127.0.0.1:0\" }",
        "listen = [{ http2 = true }]",
        "response.fields = [\"x\"]",
        "overload.max_in_flight = \"on\"",
    ] {
        assert!(refuses(line), "{line} is accepted");
    }
    for line in [
        "server.drain_delay = \"${DELAY:-10s}\"",
        "limit.a = { key = [], rate = \"${RATE}\", mode = \"${MODE}\" }",
        "user = [{ from = \"header\" }, { from = \"client_cert\" }]",
        "override = [{ limit = \"a\", ip = \"::1\", block = true, until = 2099-01-31 }]",
        "overload.max_in_flight = 100",
    ] {
        assert!(!refuses(line), "{line} is refused");
    }
}

/// The keys of all tables of a schema.
fn keys_of(schema: &Value, found: &mut Vec<String>) {
    for (name, part) in schema.as_object().into_iter().flatten() {
        if name == "properties" {
            let properties = part.as_object().expect("an object");
            for (key, schema) in properties {
                let text = schema["description"].as_str().unwrap_or_default();
                assert!(
                    text.contains("docs/config.md#"),
                    "{key} has no link: {text}"
                );
                found.push(key.clone());
            }
            properties
                .values()
                .for_each(|schema| keys_of(schema, found));
        } else {
            keys_of(part, found);
            part.as_array()
                .into_iter()
                .flatten()
                .for_each(|part| keys_of(part, found));
        }
    }
}

#[test]
fn the_schema_has_every_key_of_the_documentation_with_a_link_to_it() {
    let mut known = Vec::new();
    keys_of(&schema(), &mut known);
    let page = fs::read_to_string("docs/config.md").expect("it can be read");
    let sections = page
        .split("\n## `[")
        .skip(1)
        .filter(|section| !section.starts_with("keys.NAME"));
    let mut seen = 0;
    for section in sections {
        let table = section.split_once("| key | type | default | meaning |\n");
        let rows = table.map_or("", |(_, rows)| rows).lines().skip(1);
        for row in rows.map_while(|row| row.strip_prefix("| `")) {
            let key = row.split('`').next().unwrap_or_default();
            assert!(
                known.iter().any(|known| known == key),
                "{key} is not in the schema"
            );
            seen += 1;
        }
    }
    assert!(seen >= 130, "only {seen} keys were seen");
}
