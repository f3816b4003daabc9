//! Configuration: every valid file loads, every invalid one says what is wrong, as the golden files show.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use proptest::prelude::*;
use tidegate::config::{self, Code, Loaded, Report, Severity};

/// The `.toml` files of a folder below tests/config.
fn files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new("tests/config").join(folder);
    let entries = fs::read_dir(&folder).expect("the folder is there");
    let paths = entries.map(|entry| entry.expect("it can be listed").path());
    let mut files: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|e| e == "toml"))
        .collect();
    files.sort();
    assert!(
        !files.is_empty(),
        "{} holds no .toml file",
        folder.display()
    );
    files
}

/// Compares with `NAME.stderr`, or writes it when UPDATE_GOLDEN=1 is set.
fn matches_golden(path: &Path, report: &Report) -> bool {
    let golden = path.with_extension("stderr");
    let found = format!("{report}\n");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&golden, &found).expect("the golden file can be written");
    }
    let expected = fs::read_to_string(&golden).unwrap_or_default();
    if found != expected {
        eprintln!("{}: (run with UPDATE_GOLDEN=1 to accept)", golden.display());
        let (old, new): (Vec<_>, Vec<_>) = (expected.lines().collect(), found.lines().collect());
        old.iter()
            .filter(|line| !new.contains(line))
            .for_each(|line| eprintln!("- {line}"));
        new.iter()
            .filter(|line| !old.contains(line))
            .for_each(|line| eprintln!("+ {line}"));
    }
    found == expected
}

fn codes(report: &Report) -> impl Iterator<Item = &'static str> {
    report
        .diagnostics
        .iter()
        .map(|diagnostic| diagnostic.code.as_str())
}

#[test]
fn invalid_files_are_refused_with_their_diagnostics() {
    let mut stale = Vec::new();
    for path in files("invalid") {
        let Err(report) = config::load(&path) else {
            panic!("{} is accepted", path.display())
        };
        assert!(report.errors() > 0, "{}", path.display());
        if !matches_golden(&path, &report) {
            stale.push(path);
        }
    }
    assert!(
        stale.is_empty(),
        "other diagnostics than expected: {stale:?}"
    );
}

#[test]
fn valid_files_load_with_their_warnings() {
    let mut stale = Vec::new();
    for path in files("valid") {
        let Loaded { warnings, .. } = config::load(&path)
            .unwrap_or_else(|report| panic!("{} is refused:\n{report}", path.display()));
        assert_eq!(warnings.errors(), 0);
        if !matches_golden(&path, &warnings) {
            stale.push(path);
        }
    }
    assert!(stale.is_empty(), "other warnings than expected: {stale:?}");
}

#[test]
fn every_code_is_shown_by_a_file() {
    let reports =
        files("invalid")
            .into_iter()
            .chain(files("valid"))
            .map(|path| match config::load(&path) {
                Ok(loaded) => loaded.warnings,
                Err(report) => report,
            });
    let none =
        config::load(Path::new("tests/config/none.toml")).expect_err("there is no such file");
    let shown: BTreeSet<&str> = reports
        .chain([none])
        .flat_map(|r| codes(&r).collect::<Vec<_>>())
        .collect();
    let known: BTreeSet<&str> = Code::ALL.iter().map(|code| code.as_str()).collect();
    assert_eq!(shown, known);
}

#[test]
fn every_code_has_a_section_in_the_documentation() {
    let text = fs::read_to_string("docs/diagnostics.md").expect("it is there");
    let headings = text.lines().filter_map(|line| line.strip_prefix("## TG"));
    let documented: Vec<String> = headings
        .filter_map(|line| line.split(' ').next())
        .map(|code| format!("TG{code}"))
        .collect();
    let known: Vec<&str> = Code::ALL.iter().map(|code| code.as_str()).collect();
    assert_eq!(documented, known, "in the order of the codes, each once");
}

#[test]
fn every_problem_says_where_it_is_and_what_to_do() {
    for path in files("invalid") {
        let report = config::load(&path).expect_err("it is invalid");
        for diagnostic in &report.diagnostics {
            let told = !diagnostic.hint.is_empty() || !diagnostic.label.is_empty();
            assert!(
                told || diagnostic.code == Code::Syntax,
                "{}: {}",
                path.display(),
                diagnostic.message
            );
            if let Some(place) = &diagnostic.place {
                let text = place.text.as_ref().expect("the lines are short");
                assert!(text.get(place.marked.clone()).is_some());
            }
        }
    }
}

#[test]
fn no_diagnostic_repeats_a_secret() {
    for path in files("invalid") {
        let report = config::load(&path).expect_err("it is invalid");
        for secret in ["hunter2", "0af10af1"] {
            let text = report.text(true) + &report.json().to_string();
            assert!(!text.contains(secret), "{}:\n{text}", path.display());
        }
    }
}

#[test]
fn a_value_from_the_environment_is_never_shown() {
    let text = "[server]\ndrain_timeout = \"${SECRET}\"\nworkers = \"${SECRET}\"\n[[listen]]\naddress = \"${SECRET}\"\n\
                max_uri_size = \"${SECRET}\"\n[client_ip]\ntrusted_proxies = [\"${SECRET}\"]\nheader = \"a ${SECRET}\"\n\
                [[user]]\nfrom = \"api_key\"\nkeys_file = \"${SECRET}\"\ninvalid = \"${SECRET}\"\n\
                [upstream.a]\nservers = [\"${SECRET}\"]\nhost = \"a ${SECRET}\"\n\
                [limit.a]\nkey = [\"${SECRET}\", \"header:a ${SECRET}\"]\nrate = \"${SECRET}\"\nalgorithm = \"${SECRET}\"\n\
                [gateway]\nlimits = [\"${SECRET}\"]\n\
                [[route]]\nname = \"a b${SECRET}\"\npath = \"${SECRET}\"\nhosts = [\"${SECRET} a\"]\nmethods = [\"${SECRET}\"]\n\
                upstream = \"${SECRET}\"\nlimits = [\"${SECRET}\"]\n\
                [response]\nfields = [\"${SECRET}\"]\non = \"${SECRET}\"\n\
                [admin]\naddress = \"${SECRET}\"\ntoken_file = \"${SECRET}\"\n[log]\nlevel = \"${SECRET}\"\n";
    let env = |name: &str| (name == "SECRET").then(|| "hunter2".to_owned());
    let report = config::compile("gateway.toml", text, Path::new(""), &env)
        .expect_err("nothing of it is right");
    assert!(report.errors() > 15, "{report}");
    assert!(!report.to_string().contains("hunter2"), "{report}");
    assert!(!report.json().to_string().contains("hunter2"));
}

#[test]
fn a_pattern_from_the_environment_is_never_shown() {
    let route = |name: &str, path: &str| {
        format!("[[route]]\nname = \"{name}\"\npath = \"{path}\"\nupstream = \"a\"\n")
    };
    let text = "[upstream.a]\nservers = [\"builtin:echo\"]\n".to_owned()
        + &route("relative", "${SECRET}")
        + &route("one", "/${SECRET}")
        + &route("two", "/hunter${TWO}")
        + &route("${SECRET}", "/a")
        + &route("${SECRET}", "/b");
    let env = |name: &str| Some(if name == "SECRET" { "hunter2" } else { "2" }.to_owned());
    let report =
        config::compile("gateway.toml", &text, Path::new(""), &env).expect_err("they collide");
    assert_eq!(report.errors(), 3, "{report}");
    assert!(!report.to_string().contains("hunter2"), "{report}");
}

#[test]
fn every_configuration_in_the_documentation_loads() {
    let mut seen = 0;
    let mut documents: Vec<PathBuf> = vec!["gateway.toml.example".into()];
    documents.extend(
        ["README.md", "ARCHITECTURE.md"]
            .map(PathBuf::from)
            .into_iter()
            .filter(|path| path.exists()),
    );
    let docs = fs::read_dir("docs")
        .expect("the folder is there")
        .map(|entry| entry.expect("it can be listed").path());
    documents.extend(docs.filter(|path| path.extension().is_some_and(|e| e == "md")));
    for path in documents {
        let text = fs::read_to_string(&path).expect("it can be read");
        let blocks = match path.extension().is_some_and(|e| e == "md") {
            true => toml_blocks(&text),
            false => vec![text.as_str()],
        };
        for block in blocks {
            seen += 1;
            let loaded = config::compile(
                &path.display().to_string(),
                block,
                Path::new("tests/config/valid/files"),
                &|_| None,
            );
            let loaded = loaded.unwrap_or_else(|report| panic!("{report}\nin:\n{block}"));
            assert!(
                loaded.warnings.is_empty(),
                "{}\nin:\n{block}",
                loaded.warnings
            );
        }
    }
    assert!(seen >= 2, "only {seen} configurations were found");
}

fn toml_blocks(markdown: &str) -> Vec<&str> {
    let after_fence = markdown.split("```toml\n").skip(1);
    after_fence
        .filter_map(|rest| rest.split("```").next())
        .collect()
}

#[test]
fn what_was_written_is_what_is_configured() {
    let path = Path::new("tests/config/valid/everything_that_is_built.toml");
    let snapshot = config::load(path).expect("it is valid").snapshot;
    let [first, ..] = snapshot.listeners.as_slice() else {
        panic!("three listeners")
    };
    assert_eq!(
        (first.http2, first.max_body_bytes, first.max_streams),
        (false, 1_000_000, 10)
    );
    assert_eq!(snapshot.server.max_keys, 4096);
    assert_eq!(snapshot.server.drain_timeout, Duration::from_secs(10));
    assert_eq!(snapshot.identity.trusted_proxies.len(), 3);
    assert_eq!(snapshot.identity.users.len(), 2);
    let names: Vec<&str> = snapshot
        .limits
        .iter()
        .map(|limit| limit.name.as_str())
        .collect();
    assert_eq!(
        names,
        ["global", "per_user", "all_parts"],
        "in the order of the file"
    );
    let per_user = &snapshot.limits[1];
    let quotas: Vec<_> = per_user
        .quotas
        .iter()
        .map(|q| (q.amount.get(), q.period.as_secs(), q.burst.get()))
        .collect();
    assert_eq!(quotas, [(60, 60, 30), (600, 60, 30), (60, 60, 1000)]);
    assert_eq!(
        per_user.tiers,
        [("pro".to_owned(), 1), ("gold".to_owned(), 2)]
    );
    assert_eq!(
        snapshot.limits[0].quotas[0].burst.get(),
        10_000,
        "one second of the rate"
    );
    let [login, rest] = snapshot.routes.as_slice() else {
        panic!("two routes")
    };
    assert_eq!(
        (login.limits.as_slice(), login.cost, login.max_body_bytes),
        (&[0, 1, 2][..], 5, Some(16_384))
    );
    assert_eq!((rest.limits.as_slice(), rest.upstream), (&[][..], 1));
    assert_eq!(snapshot.admin.token.as_deref(), Some("correct-horse"));
}

#[test]
fn a_file_of_a_hundred_thousand_keys_loads_in_linear_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let entry = |n: u32| {
        format!("[keys.key-{n}]\nsha256 = \"{n:064x}\"\nuser = \"user-{n}\"\ntier = \"pro\"\n")
    };
    fs::write(
        folder.path().join("keys.toml"),
        (0..100_000).map(entry).collect::<String>(),
    )
    .expect("it is written");
    let text = format!(
        "[[user]]\nfrom = \"api_key\"\nkeys_file = \"keys.toml\"\n{}",
        config::quick("builtin:echo", "1/s", None, None)
    );
    let start = Instant::now();
    let loaded =
        config::compile("gateway.toml", &text, folder.path(), &|_| None).expect("it is valid");
    let took = start.elapsed();
    let tidegate::identity::UserSource::ApiKey { keys, .. } = &loaded.snapshot.identity.users[0]
    else {
        panic!("keys")
    };
    assert_eq!(keys.len(), 100_000);
    // a fraction of a second in production; unoptimised and on a busy machine a multiple, but quadratic would be minutes
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn a_report_stays_short_however_much_is_wrong() {
    let text: String = (0..10_000).map(|n| format!("key{n} = 1\n")).collect();
    let report = config::compile("gateway.toml", &text, Path::new(""), &|_| None)
        .expect_err("nothing is known");
    assert!(report.errors() > 10_000);
    assert_eq!(report.diagnostics.len(), config::MAX_SHOWN);
    assert!(report.text(false).contains("more problems not shown"));
    let long = format!("x = \"{}\"", "a".repeat(100_000));
    let report =
        config::compile("gateway.toml", &long, Path::new(""), &|_| None).expect_err("x is unknown");
    assert!(report.to_string().len() < 2_000);
}

/// What a mutation puts into a configuration.
const SCRAPS: &[&str] = &[
    "",
    "[",
    "]",
    "[[",
    "]]",
    "{",
    "}",
    "=",
    "\"",
    "'",
    "\"\"\"",
    "\n",
    "\r",
    ".",
    ",",
    "#",
    "-1",
    "0",
    "1e400",
    "0x",
    "nan",
    "99999999999999999999",
    "\u{0}",
    "é",
    "\u{1b}",
    "${",
    "${A}",
    "$${",
    "\\",
    "\\u0000",
    "[limit.a]\n",
    "[[route]]\n",
    "[user]\n",
    "/0s",
    "1979-05-27",
    "true",
    "a.b.c = 1\n",
    "[a.b]\n",
    "unix:",
    "http://",
    "{*",
    "://@",
];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn no_text_makes_the_compiler_panic(text in ".{0,200}") {
        check_any(&text);
    }

    #[test]
    fn no_bytes_make_the_loader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gateway.toml");
        fs::write(&path, bytes).expect("it is written");
        prop_assert!(config::load(&path).is_err());
    }

    #[test]
    fn no_mutation_of_a_configuration_makes_the_compiler_panic(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), 0..8_usize, prop::sample::select(SCRAPS)), 1..6),
        which in any::<prop::sample::Index>(),
    ) {
        let all = [files("valid"), files("invalid")].concat();
        let mut text = String::from_utf8_lossy(&fs::read(which.get(&all)).expect("it can be read")).into_owned();
        for (at, removed, scrap) in edits {
            let start = text.floor_char_boundary(at.index(text.len() + 1));
            let end = text.floor_char_boundary((start + removed).min(text.len())).max(start);
            text.replace_range(start..end, scrap);
        }
        check_any(&text);
    }
}

/// Whatever the text is, the outcome is whole and can be shown.
fn check_any(text: &str) {
    match config::compile("any.toml", text, Path::new("tests/config/valid"), &|_| None) {
        Ok(loaded) => {
            assert_eq!(loaded.warnings.errors(), 0);
            assert!(!loaded.snapshot.listeners.is_empty() && !loaded.snapshot.routes.is_empty());
            loaded.warnings.text(true);
        }
        Err(report) => {
            assert!(
                report
                    .diagnostics
                    .iter()
                    .any(|diagnostic| diagnostic.severity == Severity::Error)
            );
            assert!(!report.text(true).is_empty());
            report.json();
        }
    }
}
