//! The records tell the truth: about docs/config.md, and about what the reader accepts.

use std::{collections::BTreeSet, fs, path::Path};

use super::*;
use crate::config::{self, Code, DiagnosticReport, Snapshot, WrittenConfig};

/// Every table but the list of tables itself, the keys file, and tables without a section of
/// their own.
const TABLES: &[&Keys] = &[
    &SERVER,
    &LISTEN,
    &LISTEN_TLS,
    &CERTIFICATE,
    &CLIENT_IP,
    &USER_API_KEY,
    &USER_JWT,
    &USER_HEADER,
    &USER_CLIENT_CERT,
    &API_KEY,
    &UPSTREAM,
    &HEALTH,
    &OUTLIER,
    &BREAKER,
    &LIMIT,
    &COST,
    &MODEL_PRICE,
    &EXEMPT,
    &GATEWAY,
    &ROUTE,
    &OVERRIDE,
    &RESPONSE,
    &OVERLOAD,
    &RESERVE,
    &REDIS,
    &SENTINEL,
    &ADMIN,
    &LOG,
    &TRACE,
];

const PAGE: &str = "docs/config.md";
const HEADER: &str = "| key | type | default | meaning |\n|---|---|---|---|\n";

/// The page with the rows of `table` replaced by those of its records.
fn with_rows(page: &str, table: &Keys) -> String {
    let heading = format!("\n## `{}`\n", table.title);
    let (before, section) = page
        .split_once(&heading)
        .unwrap_or_else(|| panic!("{PAGE} has no heading{heading}"));
    let (prose, rest) = section
        .split_once(HEADER)
        .unwrap_or_else(|| panic!("{} has no table of keys", table.title));
    assert!(
        !prose.contains("\n## "),
        "{} has no table of keys",
        table.title
    );
    let end = rest.find("\n\n").map_or(rest.len(), |at| at + 1);
    let rows: String = table
        .keys
        .iter()
        .map(|record| record.row() + "\n")
        .collect();
    [before, &heading, prose, HEADER, &rows, &rest[end..]].concat()
}

#[test]
fn the_tables_of_the_documentation_are_those_of_the_records() {
    let page = fs::read_to_string(PAGE).expect("the page is there");
    let generated = TABLES
        .iter()
        .fold(page.clone(), |page, table| with_rows(&page, table));
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        fs::write(PAGE, &generated).expect("the page is writable");
        return;
    }
    let written: BTreeSet<&str> = page.lines().collect();
    let new: Vec<&str> = generated
        .lines()
        .filter(|line| !written.contains(line))
        .collect();
    assert!(
        page == generated,
        "{PAGE} differs from src/config/keys (edit the records, then run with UPDATE_GOLDEN=1):\n{}",
        new.join("\n")
    );
}

/// The least file that has `table` and no problem, up to the table; and the lines that the table
/// needs.
fn frame(table: &Keys) -> (&'static str, &'static str) {
    match table.title {
        "[[listen]]" => ("", "address = \"127.0.0.1:0\""),
        "[listen.tls]" => (
            "[[listen]]\naddress = \"127.0.0.1:0\"\n",
            "certificates = [{ cert = \"files/server.pem\", key = \"files/server.key\" }]",
        ),
        "[[user]] from = \"api_key\"" => ("", "keys_file = \"files/keys.toml\""),
        "[[user]] from = \"jwt\"" => ("", "jwks_url = \"https://issuer.example/keys\""),
        "[upstream.NAME]" => ("", "servers = [\"builtin:echo\"]"),
        "[upstream.NAME.health]" => (
            "[upstream.NAME]\nservers = [\"builtin:echo\"]\n",
            "path = \"/healthz\"",
        ),
        "[upstream.NAME.outlier]" | "[upstream.NAME.breaker]" => {
            ("[upstream.NAME]\nservers = [\"builtin:echo\"]\n", "")
        }
        "[limit.NAME]" => (
            "[redis]\n",
            "key = [\"ip\"]\nrate = \"1000000000/s\"\nscope = \"global\"",
        ),
        "[limit.NAME.cost]" => (
            "[limit.NAME]\nkey = [\"ip\"]\nrate = \"1000/s\"\n",
            "preset = \"openai\"",
        ),
        "[prices.NAME.MODEL]" => (
            "[limit.a]\nkey = []\nrate = \"1 NAME/d\"\ncost = { preset = \"openai\", prices = \"NAME\" }\n",
            "input = 1\noutput = 1",
        ),
        "[limit.NAME.exempt]" => ("[limit.NAME]\nkey = [\"ip\"]\nrate = \"1/s\"\n", ""),
        "[[override]]" => (
            "[limit.a]\nkey = [\"ip\"]\nrate = \"1/s\"\n",
            "limit = \"a\"\nip = \"192.0.2.1\"\nrate = \"1000000000/s\"",
        ),
        "[[route]]" => ("", "name = \"a\"\npath = \"/a\"\nupstream = \"api\""),
        "[overload.reserve]" => ("[overload]\n", ""),
        "[redis.sentinel]" => ("[redis]\n", "master = \"a\"\nnodes = [\"127.0.0.1:1\"]"),
        _ => ("", ""),
    }
}

/// Lines that a key needs beside it; a line without a value removes a key of the frame.
fn beside(table: &Keys, key: &str) -> &'static str {
    match (table.title, key) {
        ("[listen.tls]", "client_auth") => "client_ca = \"files/ca.pem\"",
        ("[limit.NAME]", "limit") => "rate\nscope\nalgorithm = \"concurrency\"",
        ("[limit.NAME]", "max_delay") => "scope\nover = \"delay\"",
        ("[limit.NAME]", "slow_by") => "slow_at = 0.5",
        ("[limit.NAME]", "slow_at") => "slow_by = \"1s\"",
        ("[limit.NAME]", "count_status" | "scope") => "scope",
        ("[limit.NAME.cost]", "scale") => "preset\nfrom = \"response_header:x-cost\"",
        ("[overload.reserve]", "critical") => "normal = 0",
        ("[overload.reserve]", "normal") => "critical = 0",
        ("[overload]", "floor") => "max_in_flight = \"adaptive\"",
        _ => "",
    }
}

/// Compiles a file whose `table` has `line` for `key`.
fn compile(table: &Keys, key: &str, line: &str) -> Result<Snapshot, DiagnosticReport> {
    let (head, needed) = frame(table);
    let name = |line: &str| line.split(" =").next().unwrap_or_default().to_owned();
    let beside = beside(table, key);
    let replaced: Vec<String> = beside.lines().chain([line, key]).map(name).collect();
    let kept = needed
        .lines()
        .filter(|line| !replaced.contains(&name(line)));
    let added = beside.lines().filter(|line| line.contains('='));
    let lines: Vec<&str> = kept.chain(added).chain([line]).collect();
    let header = match table.title.split_once(" from") {
        Some((header, _)) if key == "from" => header.to_owned(),
        Some((header, from)) => format!("{header}\nfrom{from}"),
        None => table.title.to_owned(),
    };
    let text = format!(
        "[upstream.api]\nservers = [\"builtin:echo\"]\n[[route]]\nname = \"all\"\n\
         path = \"/{{*rest}}\"\nupstream = \"api\"\n{head}{header}\n{}\n",
        lines.join("\n")
    );
    let folder = Path::new("tests/config/valid");
    config::compile("gateway.toml", &text, folder, &|_| None).map(|loaded| loaded.snapshot)
}

/// Values at the ends of the range of a kind, and the next beyond.
fn ends(kind: &ValueKind) -> (Vec<String>, Vec<String>) {
    let around = |least: u64, most: u64, show: &dyn Fn(u64) -> String| {
        let below = least.checked_sub(1).map(show);
        let above = most.checked_add(1).map(show);
        (
            vec![show(least), show(most)],
            below.into_iter().chain(above).collect::<Vec<_>>(),
        )
    };
    match kind {
        ValueKind::Integer(least, most) => {
            let (good, mut bad) = around(*least, *most, &|number| number.to_string());
            bad.push("-1".to_owned());
            (good, bad)
        }
        ValueKind::Share(least, most) => {
            let show = |ppm: u64| format!("{}.{:06}", ppm / 1_000_000, ppm % 1_000_000);
            let (good, mut bad) = around(u64::from(*least), u64::from(*most), &show);
            bad.push("-0.000001".to_owned());
            (good, bad)
        }
        ValueKind::Duration(least, most) => around(*least, *most, &|ms| format!("\"{ms}ms\"")),
        ValueKind::Size(least, most) => around(*least, *most, &|bytes| format!("\"{bytes}B\"")),
        ValueKind::ByTier(kind) => ends(kind),
        ValueKind::List(_, kind) => {
            let (good, bad) = ends(kind);
            let list =
                |values: Vec<String>| values.iter().map(|value| format!("[{value}]")).collect();
            (list(good), list(bad))
        }
        ValueKind::OneOf(kinds) => {
            let all = kinds.iter().map(ends);
            all.max_by_key(|(good, _)| good.len()).unwrap_or_default()
        }
        _ => (Vec::new(), Vec::new()),
    }
}

/// Every key of a table that a gateway file may have.
fn keys() -> impl Iterator<Item = (&'static Keys, &'static KeyRecord)> {
    let tables = TABLES
        .iter()
        .copied()
        .filter(|table| table.title != API_KEY.title);
    tables.flat_map(|table| table.keys.iter().map(move |record| (table, record)))
}

#[test]
fn the_ends_of_every_range_are_accepted_and_the_next_values_are_out_of_range() {
    let mut seen = 0;
    for (table, record) in keys() {
        let (good, bad) = ends(&record.kind);
        for value in &good {
            let line = format!("{} = {value}", record.name);
            if let Err(report) = compile(table, record.name, &line) {
                panic!("{line} in {} is refused:\n{report}", table.title);
            }
        }
        for value in &bad {
            let line = format!("{} = {value}", record.name);
            let Err(report) = compile(table, record.name, &line) else {
                panic!("{line} in {} is accepted", table.title)
            };
            let codes: Vec<Code> = report.diagnostics.iter().map(|found| found.code).collect();
            assert!(codes.contains(&Code::OutOfRange), "{line}:\n{report}");
        }
        seen += good.len().min(1);
    }
    assert!(seen >= 60, "only {seen} keys have a range");
}

#[test]
fn every_default_is_what_a_missing_key_means() {
    let shown = |table: &Keys, key: &str, line: &str| {
        let snapshot = compile(table, key, line)
            .unwrap_or_else(|report| panic!("{line} in {} is refused:\n{report}", table.title));
        let snapshot = Snapshot {
            hash: String::new(),
            written: WrittenConfig::default(),
            ..snapshot
        };
        // a hash map has no order
        let text = format!("{snapshot:#?}");
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    let mut seen = 0;
    for (table, record) in keys() {
        if let Some(default) = record.default_text() {
            let line = format!("{} = {default}", record.name);
            assert!(
                shown(table, record.name, &line) == shown(table, record.name, ""),
                "{line} in {} is not what a missing key means",
                table.title
            );
            seen += 1;
        }
    }
    assert!(seen >= 70, "only {seen} keys have a default");
}

#[test]
fn every_word_of_a_choice_is_known_to_the_reader_and_no_other() {
    let knows = |table: &Keys, record: &KeyRecord, word: &str| {
        let is_list = matches!(record.kind, ValueKind::List(..));
        let line = match is_list {
            true => format!("{} = [\"{word}\"]", record.name),
            false => format!("{} = \"{word}\"", record.name),
        };
        let report = compile(table, record.name, &line).err();
        let found = report.iter().flat_map(|report| &report.diagnostics);
        found
            .into_iter()
            .all(|found| found.code != Code::UnknownChoice)
    };
    for (table, record) in keys().filter(|(_, record)| !record.kind.words().is_empty()) {
        let at = format!("{} in {}", record.name, table.title);
        for word in record.kind.words() {
            assert!(knows(table, record, word), "{at} does not know {word}");
        }
        assert!(!knows(table, record, "other"), "{at} knows other words");
    }
}
