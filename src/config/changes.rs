//! What a reload changes: compares two configurations as written, table by table.
//!
//! A table whose position or comments changed counts as unchanged. Environment values are not
//! compared: they cannot change while the process runs.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::{snapshot::Snapshot, written::WrittenConfig};

/// The differences between two configurations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// `[limit.*]`, by name.
    pub limits: NamedChanges,
    /// `[[route]]`, by name.
    pub routes: NamedChanges,
    /// `[upstream.*]`, by name.
    pub upstreams: NamedChanges,
    /// `[[listen]]`, by address.
    pub listeners: NamedChanges,
    /// Other tables that differ, such as `response`.
    pub tables: Vec<String>,
    /// Files named by the configuration whose content differs.
    pub files: Vec<String>,
    /// Changed keys that take effect only at the next start of the process.
    pub after_restart: Vec<String>,
}

/// Changes to named entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedChanges {
    /// New.
    pub added: Vec<String>,
    /// Gone.
    pub removed: Vec<String>,
    /// In both, but different.
    pub changed: Vec<String>,
}

/// Tables whose entries have names.
const NAMED: [&str; 4] = ["limit", "route", "upstream", "listen"];

/// Keys that are read only when the process starts.
const AT_START: [(&str, &str); 6] = [
    ("server", "workers"),
    ("server", "max_keys"),
    ("admin", "address"),
    ("log", "level"),
    ("log", "format"),
    ("trace", "otlp_endpoint"),
];

impl Changes {
    /// Compares two snapshots.
    pub fn between(old: &Snapshot, new: &Snapshot) -> Changes {
        let (was, is) = (&old.written, &new.written);
        let names: BTreeSet<&String> = [&was.tables, &is.tables]
            .into_iter()
            .filter_map(Value::as_object)
            .flat_map(Map::keys)
            .collect();
        let others = names.into_iter().filter(|name| {
            !NAMED.contains(&name.as_str()) && was.tables.get(name) != is.tables.get(name)
        });
        let paths: BTreeSet<_> = was.files.keys().chain(is.files.keys()).collect();
        let files = paths
            .into_iter()
            .filter(|path| was.files.get(*path) != is.files.get(*path));
        let at_start = AT_START
            .iter()
            .filter(|(table, key)| was.tables[table].get(key) != is.tables[table].get(key));
        Changes {
            limits: NamedChanges::between(was, is, "limit", "name"),
            routes: NamedChanges::between(was, is, "route", "name"),
            upstreams: NamedChanges::between(was, is, "upstream", "name"),
            listeners: NamedChanges::between(was, is, "listen", "address"),
            tables: others.cloned().collect(),
            files: files.map(|path| path.display().to_string()).collect(),
            after_restart: at_start
                .map(|(table, key)| format!("{table}.{key}"))
                .collect(),
        }
    }

    /// Whether nothing differs.
    pub fn is_empty(&self) -> bool {
        self == &Changes::default()
    }

    /// For the response to a reload request.
    pub fn json(&self) -> Value {
        json!({
            "limits": self.limits.json(),
            "routes": self.routes.json(),
            "upstreams": self.upstreams.json(),
            "listeners": self.listeners.json(),
            "tables": self.tables,
            "files": self.files,
            "after_restart": self.after_restart,
        })
    }
}

/// For the log: `limits +new -old ~changed; tables response`.
impl std::fmt::Display for Changes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let named = [
            ("limits", &self.limits),
            ("routes", &self.routes),
            ("upstreams", &self.upstreams),
            ("listeners", &self.listeners),
        ];
        let mut parts: Vec<String> = named
            .into_iter()
            .filter_map(|(kind, named)| Some(format!("{kind} {}", named.text()?)))
            .collect();
        for (kind, list) in [("tables", &self.tables), ("files", &self.files)] {
            if !list.is_empty() {
                parts.push(format!("{kind} {}", list.join(" ")));
            }
        }
        if !self.after_restart.is_empty() {
            let keys = self.after_restart.join(", ");
            parts.push(format!("after a restart: {keys}"));
        }
        match parts.is_empty() {
            true => f.write_str("nothing changed"),
            false => f.write_str(&parts.join("; ")),
        }
    }
}

impl NamedChanges {
    fn between(was: &WrittenConfig, is: &WrittenConfig, table: &str, label: &str) -> NamedChanges {
        let (was, is) = (
            entries(&was.tables[table], label),
            entries(&is.tables[table], label),
        );
        let missing =
            |from: &BTreeMap<String, Vec<&Value>>, name: &String| !from.contains_key(name);
        let differs = |(name, old): (&String, &Vec<&Value>)| {
            let new = is.get(name)?;
            (old != new).then(|| name.clone())
        };
        NamedChanges {
            added: is
                .keys()
                .filter(|name| missing(&was, name))
                .cloned()
                .collect(),
            removed: was
                .keys()
                .filter(|name| missing(&is, name))
                .cloned()
                .collect(),
            changed: was.iter().filter_map(differs).collect(),
        }
    }

    fn json(&self) -> Value {
        json!({ "added": self.added, "removed": self.removed, "changed": self.changed })
    }

    fn text(&self) -> Option<String> {
        let signed = |sign: char, names: &[String]| -> Vec<String> {
            names.iter().map(|name| format!("{sign}{name}")).collect()
        };
        let mut words = signed('+', &self.added);
        words.extend(signed('-', &self.removed));
        words.extend(signed('~', &self.changed));
        (!words.is_empty()).then(|| words.join(" "))
    }
}

/// The entries of `[table.NAME]` by name, or of `[[table]]` by the key `label`, which several may
/// share.
fn entries<'a>(tables: &'a Value, label: &str) -> BTreeMap<String, Vec<&'a Value>> {
    let mut entries: BTreeMap<String, Vec<&Value>> = BTreeMap::new();
    match tables {
        Value::Object(tables) => {
            for (name, table) in tables {
                entries.entry(name.clone()).or_default().push(table);
            }
        }
        Value::Array(tables) => {
            for table in tables {
                let name = table[label].as_str().unwrap_or_default().to_owned();
                entries.entry(name).or_default().push(table);
            }
        }
        _ => {}
    }
    entries
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config;

    fn snapshot(text: &str) -> Snapshot {
        let upstream = "[upstream.echo]\nservers = [\"builtin:echo\"]\n";
        let text = format!(
            "{text}\n{upstream}[[route]]\nname = \"all\"\npath = \"/\"\nupstream = \"echo\"\n"
        );
        config::compile("gateway.toml", &text, Path::new(""), &|_| None)
            .unwrap_or_else(|report| panic!("{report}"))
            .snapshot
    }

    fn changes(old: &str, new: &str) -> Changes {
        Changes::between(&snapshot(old), &snapshot(new))
    }

    #[test]
    fn a_file_that_says_the_same_in_other_words_has_not_changed() {
        let old = "[limit.a]\nrate = \"1/s\"\nkey = [\"ip\"]";
        let new = "# new\n[limit]\na = { key = [ \"ip\" ], rate = '1/s' }";
        assert!(changes(old, new).is_empty());
        assert_eq!(changes(old, new).to_string(), "nothing changed");
    }

    #[test]
    fn named_tables_are_told_apart_by_name_and_others_by_table() {
        let old = "[limit.a]\nrate = \"1/s\"\nkey = []\n[limit.b]\nrate = \"1/s\"\nkey = []\n[[listen]]\naddress = \"127.0.0.1:0\"";
        let new = "[limit.a]\nrate = \"2/s\"\nkey = []\n[limit.c]\nrate = \"1/s\"\nkey = []\n[[listen]]\naddress = \"127.0.0.1:0\"\nhttp2 = false\n[server]\nworkers = 7\n[response]\non = \"rejected\"";
        let changes = changes(old, new);
        assert_eq!(
            changes.to_string(),
            "limits +c -b ~a; listeners ~127.0.0.1:0; tables response server; after a restart: server.workers"
        );
        assert_eq!(changes.json()["limits"]["added"], json!(["c"]));
    }
}
