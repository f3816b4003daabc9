//! Configuration: every valid file loads, and every invalid one produces the diagnostics of its
//! golden file.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use proptest::prelude::*;
use tidegate::{
    config::{
        self, Code, DiagnosticReport, Effect, LimitSettings, LoadedConfig, Mode, Over,
        OverrideTarget, Severity, Share,
    },
    identity::{ClaimRules, KeySource, Missing, OnInvalid, UserSource},
    limit::Algorithm,
    listener::tls::{MinVersion, certificate::ClientAuth},
};

/// The `.toml` files of a folder under tests/config.
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

/// Compares with `NAME.stderr`, or writes it if UPDATE_GOLDEN=1.
fn matches_golden(path: &Path, report: &DiagnosticReport) -> bool {
    let golden = path.with_extension("stderr");
    let found = format!("{report}\n");
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
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

fn codes(report: &DiagnosticReport) -> impl Iterator<Item = &'static str> {
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
        let LoadedConfig { warnings, .. } = config::load(&path)
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
    let unfit = config::unfit("gateway.toml", "the address is taken".to_owned());
    let shown: BTreeSet<&str> = reports
        .chain([none, unfit])
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
                over = \"${SECRET}\"\nmode = \"${SECRET}\"\nmissing = \"${SECRET}\"\nmax_delay = \"${SECRET}\"\nslow_by = \"${SECRET}\"\n\
                exempt = { ips = [\"${SECRET}\"], tiers = [\"a ${SECRET}\"] }\n\
                [limit.b]\nkey = [\"ip\", \"query:${SECRET}\\u0000\"]\nrate = \"1/s\"\n\
                [limit.c]\nkey = [\"ip\"]\nrate = \"1/s\"\n\
                [[override]]\nlimit = \"${SECRET}\"\nip = \"${SECRET}\"\nrate = \"${SECRET}\"\n\
                [[override]]\nlimit = \"c\"\nkey = \"ip=${SECRET}\"\nrate = \"${SECRET}\"\n\
                [[override]]\nlimit = \"c\"\nuser = \"${SECRET}\"\nblock = true\n\
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
    assert_eq!(snapshot.identity.users.len(), 7);
    let UserSource::Jwt(tokens) = &snapshot.identity.users[1] else {
        panic!("the second reads tokens")
    };
    let KeySource::Fixed(keys) = &tokens.keys else {
        panic!("its keys are in a file")
    };
    assert_eq!(keys.len(), 3);
    let claims = ClaimRules {
        issuer: Some("https://issuer.example".to_owned()),
        audience: vec!["api".to_owned(), "admin".to_owned()],
        leeway: Duration::ZERO,
        user: "email".to_owned(),
        tier: Some("plan".to_owned()),
        tenant: Some("org.id".to_owned()),
        others: vec!["device.id".to_owned()],
    };
    assert_eq!(tokens.claims, claims);
    assert_eq!(tokens.invalid, OnInvalid::Anonymous);
    let UserSource::Jwt(tokens) = &snapshot.identity.users[2] else {
        panic!("the third reads tokens")
    };
    let KeySource::Url(published) = &tokens.keys else {
        panic!("its keys are published")
    };
    assert_eq!(published.refresh, Duration::from_secs(3600));
    assert_eq!(
        published.url,
        "https://issuer.example/.well-known/jwks.json"
    );
    let tls = first.tls.as_ref().expect("it has certificates");
    assert_eq!(
        (tls.min_version, tls.max_handshakes),
        (MinVersion::Tls13, 100)
    );
    let (_, auth) = tls.files.client_ca.as_ref().expect("there is one");
    assert_eq!(*auth, ClientAuth::Required);
    let names: Vec<&str> = snapshot
        .limits
        .iter()
        .map(|limit| limit.name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "global",
            "per_user",
            "all_parts",
            "sliding",
            "log",
            "fixed",
            "queue",
            "in_flight"
        ],
        "in the order of the file"
    );
    let per_user = &snapshot.limits[1];
    let quotas: Vec<_> = per_user
        .quotas
        .iter()
        .map(|q| (q.amount.get(), q.period.as_secs(), q.burst.get()))
        .collect();
    assert_eq!(
        quotas,
        [
            (60, 60, 30),
            (600, 60, 30),
            (60, 60, 1000),
            // overrides: one second of 5000/min exceeds the default burst
            (5000, 60, 83),
            (1, 60, 2)
        ]
    );
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
        (&[0, 1, 2, 3, 4, 5, 6, 7][..], 5, Some(16_384))
    );
    assert_eq!((rest.limits.as_slice(), rest.upstream), (&[][..], 1));
    assert_eq!(snapshot.admin.token.as_deref(), Some("correct-horse"));
}

#[test]
fn what_a_limit_does_is_what_was_written() {
    let path = Path::new("tests/config/valid/everything_that_is_built.toml");
    let snapshot = config::load(path).expect("it is valid").snapshot;
    let [
        global,
        per_user,
        all_parts,
        sliding,
        log,
        fixed,
        queue,
        in_flight,
    ] = snapshot.limits.as_slice()
    else {
        panic!("eight limits")
    };
    let algorithms: Vec<Algorithm> = snapshot.limits.iter().map(|l| l.algorithm).collect();
    assert_eq!(
        algorithms,
        [
            Algorithm::Gcra,
            Algorithm::TokenBucket,
            Algorithm::TokenBucket,
            Algorithm::SlidingWindow,
            Algorithm::SlidingLog,
            Algorithm::FixedWindow,
            Algorithm::LeakyBucket,
            Algorithm::Concurrency
        ]
    );
    assert_eq!((global.mode, global.over), (Mode::Enforce, Over::Reject));
    assert_eq!(
        global.overrides[0].target,
        OverrideTarget::Key("all".to_owned())
    );
    let last: Vec<String> = all_parts.key.iter().map(ToString::to_string).collect();
    assert_eq!(
        last[11..],
        [
            "query:page",
            "cookie:session",
            "claim:device.id",
            "param:id",
            "body:user.name"
        ]
    );

    let [acme, bulk] = per_user.overrides.as_slice() else {
        panic!("two exceptions")
    };
    assert_eq!(acme.target, OverrideTarget::User("acme".to_owned()));
    assert_eq!(
        (acme.effect, bulk.effect),
        (Effect::Quota(3), Effect::Quota(4))
    );
    assert_eq!((acme.until, acme.note.is_some()), (bulk.until, true));

    assert_eq!(
        (sliding.mode, sliding.missing),
        (Mode::Tag, Missing::Shared)
    );
    assert_eq!(sliding.exempt.ips.len(), 2);
    assert_eq!(sliding.exempt.users, ["monitoring"]);
    assert_eq!(sliding.exempt.tiers, ["pro"]);
    assert_eq!(sliding.warn_at.map(Share::ppm), Some(800_000));
    let slow = sliding.slow.expect("it slows");
    assert_eq!(
        (slow.at.ppm(), slow.by),
        (1_000_000, Duration::from_millis(50))
    );
    assert_eq!(sliding.count_status, [401, 403]);
    assert!(sliding.charge_rejected && sliding.disclose && !log.disclose);
    let burst = |limit: &LimitSettings, index: usize| limit.quotas[index].burst.get();
    assert_eq!((burst(sliding, 0), burst(sliding, 2)), (60, 6000));

    assert_eq!((log.enforce_percent, log.missing), (25, Missing::Reject));
    assert_eq!(log.overrides[0].effect, Effect::Block);
    assert_eq!((fixed.mode, queue.mode), (Mode::Shadow, Mode::Off));
    let max_delay = Duration::from_millis(500);
    assert_eq!(queue.over, Over::Delay { max_delay });
    assert_eq!((burst(in_flight, 0), burst(in_flight, 1)), (20, 100));
    assert_eq!(in_flight.overrides[0].effect, Effect::Exempt);
}

#[test]
fn three_plans_take_a_dozen_lines_and_each_cell_is_right() {
    let path = Path::new("tests/config/valid/plans.toml");
    let snapshot = config::load(path).expect("it is valid").snapshot;
    let cells = |name: &str| -> Vec<String> {
        let named = |limit: &&LimitSettings| limit.name == name;
        let limit = snapshot.limits.iter().find(named).expect("a limit");
        let tiers = limit.tiers.iter().map(|(tier, at)| (tier.as_str(), *at));
        std::iter::once(("free", 0))
            .chain(tiers)
            .map(|(tier, at)| format!("{tier}: {}, {}", limit.quotas[at], limit.quotas[at].burst))
            .collect()
    };
    assert_eq!(
        cells("plan"),
        [
            "free: 60/min, 5",
            "pro: 600/min, 50",
            "enterprise: 6000/min, 500"
        ]
    );
    assert_eq!(
        cells("search"),
        [
            "free: 10/min, 10",
            "pro: 100/min, 100",
            "enterprise: 1000/min, 1000"
        ]
    );
    assert_eq!(
        cells("export"),
        ["free: 2/h, 2", "pro: 20/h, 20", "enterprise: 200/h, 200"]
    );
    let met: Vec<_> = snapshot.routes.iter().map(|r| r.limits.clone()).collect();
    assert_eq!(met, [vec![0, 1], vec![0, 2], vec![0]]);
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
    // CPU time of this thread, independent of other load
    let worked = || {
        let text = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux has it");
        let ns = text.split(' ').next().and_then(|ns| ns.parse().ok());
        Duration::from_nanos(ns.expect("it begins with a number"))
    };
    let start = worked();
    let loaded =
        config::compile("gateway.toml", &text, folder.path(), &|_| None).expect("it is valid");
    let took = worked() - start;
    let tidegate::identity::UserSource::ApiKey { keys, .. } = &loaded.snapshot.identity.users[0]
    else {
        panic!("keys")
    };
    assert_eq!(keys.len(), 100_000);
    // a fraction of a second in production, a multiple of it unoptimized; quadratic time would be
    // minutes
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

/// Fragments that a mutation inserts into a configuration.
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

/// For any text, the outcome is complete and can be printed.
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
