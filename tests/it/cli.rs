//! The command line and its exit codes: 0 for success, 1 for findings or failure, 2 for usage.

use std::{fs, path::Path};

use crate::support::{
    Gateway, Origin, Request,
    cli::{finish, tidegate_command},
    tidegate,
};

/// Presets of `tidegate init` in the command's help.
const PRESETS: &[&str] = &["api", "login", "llm", "internal"];

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn write(folder: &Path, toml: &str) {
    fs::write(folder.join("gateway.toml"), toml).expect("a temporary folder is writable");
}

/// A valid configuration.
const SOUND: &str = r#"
[[listen]]
address = "127.0.0.1:0"
[upstream.api]
servers = ["http://127.0.0.1:9000"]
[limit.per_ip]
key = ["ip"]
rate = "100/s"
[gateway]
limits = ["per_ip"]
[[route]]
name = "all"
path = "/{*rest}"
upstream = "api"
"#;

#[test]
fn check_is_0_for_a_sound_configuration() {
    let folder = folder();
    write(folder.path(), SOUND);
    let checked = tidegate(folder.path(), &["check", "--config", "gateway.toml"]);
    assert_eq!(checked.code, Some(0), "{checked}");
}

#[test]
fn the_file_may_be_named_without_an_option_or_by_the_environment() {
    let folder = folder();
    fs::write(folder.path().join("other.toml"), SOUND).expect("it is written");
    let named = tidegate(folder.path(), &["check", "other.toml"]);
    assert_eq!(named.code, Some(0), "{named}");
    let mut command = tidegate_command(folder.path());
    command.env("TIDEGATE_CONFIG", "other.toml");
    let by_environment = finish(command.arg("check"), b"");
    assert_eq!(by_environment.code, Some(0), "{by_environment}");
    let twice = tidegate(
        folder.path(),
        &["check", "other.toml", "--config", "other.toml"],
    );
    assert_eq!(twice.code, Some(2), "{twice}");
}

#[test]
fn options_that_need_no_file_do_not_mind_one_in_the_environment() {
    let folder = folder();
    let mut command = tidegate_command(folder.path());
    command.env("TIDEGATE_CONFIG", "other.toml");
    command.args(["run", "--to", "http://localhost:3000", "--print-config"]);
    let printed = finish(&mut command, b"");
    assert_eq!(printed.code, Some(0), "{printed}");
    let options = ["run", "other.toml", "--to", "http://localhost:3000"];
    assert_eq!(tidegate(folder.path(), &options).code, Some(2));
}

#[test]
fn check_is_1_and_says_where_what_and_how_to_mend_it() {
    let folder = folder();
    write(
        folder.path(),
        &SOUND
            .replace("limits =", "limitt =")
            .replace("100/s", "100/fortnight"),
    );
    let checked = tidegate(folder.path(), &["check", "--config", "gateway.toml"]);
    assert_eq!(checked.code, Some(1), "{checked}");
    // line 8 is the rate, line 10 the misspelled key
    for part in [
        "gateway.toml:8:",
        "fortnight",
        "gateway.toml:10:1",
        "limitt",
        "did you mean",
        "limits",
        "TG",
    ] {
        assert!(
            checked.stderr.contains(part),
            "stderr does not say {part:?}: {checked}"
        );
    }
}

#[test]
fn check_speaks_json_where_a_program_reads() {
    let folder = folder();
    write(folder.path(), &SOUND.replace("limits =", "limitt ="));
    let checked = tidegate(
        folder.path(),
        &["check", "--config", "gateway.toml", "--format", "json"],
    );
    assert_eq!(checked.code, Some(1), "{checked}");
    let json: serde_json::Value =
        serde_json::from_str(&checked.stdout).unwrap_or_else(|error| panic!("{error}: {checked}"));
    assert!(json.to_string().contains("limitt"), "{checked}");
}

#[test]
fn settings_that_are_not_built_are_refused_not_ignored() {
    let folder = folder();
    let lines = "scope = \"global\"\nover = \"delay\"\nmax_delay = \"1s\"\nrate =";
    let shared = SOUND.replace("rate =", lines);
    write(folder.path(), &format!("{shared}\n[redis]\n"));
    let checked = tidegate(folder.path(), &["check", "--config", "gateway.toml"]);
    assert_eq!(checked.code, Some(1), "{checked}");
    assert!(
        checked.stderr.contains("`over`") && checked.stderr.contains("not built"),
        "{checked}"
    );
}

#[test]
fn a_missing_file_is_1_and_is_named() {
    let folder = folder();
    for command in ["check", "run"] {
        let finished = tidegate(folder.path(), &[command, "--config", "absent.toml"]);
        assert_eq!(finished.code, Some(1), "{finished}");
        assert!(finished.stderr.contains("absent.toml"), "{finished}");
    }
}

#[test]
fn usage_errors_are_2() {
    let folder = folder();
    for arguments in [
        &["no-such-command"][..],
        &["run", "--no-such-option"],
        &["check", "--format", "xml"],
    ] {
        let finished = tidegate(folder.path(), arguments);
        assert_eq!(finished.code, Some(2), "{arguments:?}: {finished}");
        assert!(!finished.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn help_and_version_are_0_and_go_to_stdout() {
    let folder = folder();
    let help = tidegate(folder.path(), &["--help"]);
    assert_eq!(help.code, Some(0), "{help}");
    for command in ["run", "check", "init", "hash-key", "healthcheck"] {
        assert!(help.stdout.contains(command), "{help}");
    }
    let version = tidegate(folder.path(), &["--version"]);
    assert_eq!(
        version.stdout.trim(),
        format!("tidegate {}", env!("CARGO_PKG_VERSION")),
        "{version}"
    );
}

#[test]
fn run_needs_no_file() {
    let origin = Origin::ok();
    let gateway = Gateway::run(&[
        "--to",
        &origin.url(),
        "--limit",
        "60/min",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "127.0.0.1:0",
    ]);
    let banner = gateway.banner();
    assert!(
        banner.contains(&origin.url()) && banner.contains("60/min"),
        "{banner}"
    );
    let mut client = gateway.connect();
    let responses: Vec<_> = (0..30).map(|_| client.send(&Request::get("/"))).collect();
    let rejected = responses.iter().position(|response| response.status == 429);
    let rejected =
        rejected.unwrap_or_else(|| panic!("30 requests at once passed 60/min; {banner}"));
    assert!(
        responses[..rejected]
            .iter()
            .all(|response| response.status == 200)
    );
    assert_eq!(
        origin.requests().len(),
        responses
            .iter()
            .filter(|response| response.status == 200)
            .count()
    );
}

#[test]
fn print_config_shows_the_file_that_the_options_stand_for() {
    let folder = folder();
    let options = [
        "run",
        "--to",
        "http://localhost:3000",
        "--limit",
        "60/min",
        "--print-config",
    ];
    let printed = tidegate(folder.path(), &options);
    assert_eq!(printed.code, Some(0), "{printed}");
    for part in ["http://localhost:3000", "60/min"] {
        assert!(printed.stdout.contains(part), "{printed}");
    }
    write(folder.path(), &printed.stdout);
    let checked = tidegate(folder.path(), &["check", "--config", "gateway.toml"]);
    assert_eq!(checked.code, Some(0), "{checked}\n{}", printed.stdout);
}

#[test]
fn bad_options_say_what_would_be_good() {
    let folder = folder();
    for (options, part) in [
        (
            ["--to", "http://localhost:3000", "--limit", "60/fortnight"],
            "fortnight",
        ),
        (
            ["--to", "builtin:nonsense", "--limit", "60/min"],
            "nonsense",
        ),
        (
            ["--to", "localhost:3000", "--limit", "60/min"],
            "did you mean \"http://localhost:3000\"?",
        ),
        (
            ["--to", "http://localhost:3000", "--limit", "10rps"],
            "'--limit <RATE>'",
        ),
    ] {
        let finished = tidegate(folder.path(), &[&["run"], &options[..]].concat());
        assert!(
            matches!(finished.code, Some(1 | 2)),
            "{options:?}: {finished}"
        );
        assert!(finished.stderr.contains(part), "{options:?}: {finished}");
    }
}

#[test]
fn a_route_that_can_never_be_admitted_is_a_finding() {
    let folder = folder();
    let toml = SOUND
        .replace("rate =", "burst = 10\nrate =")
        .replace("upstream = \"api\"", "upstream = \"api\"\ncost = 11");
    write(folder.path(), &toml);
    let checked = tidegate(folder.path(), &["check", "--config", "gateway.toml"]);
    assert_eq!(checked.code, Some(1), "{checked}");
    assert!(
        checked.stderr.contains("per_ip") && checked.stderr.contains("all"),
        "{checked}"
    );
}

#[test]
fn every_preset_of_init_passes_check() {
    for preset in PRESETS {
        let folder = folder();
        let options = ["init", "--preset", preset, "--output", "gateway.toml"];
        let written = tidegate(folder.path(), &options);
        assert_eq!(written.code, Some(0), "{preset}: {written}");
        let text = fs::read_to_string(folder.path().join("gateway.toml")).unwrap_or_else(|error| {
            panic!("{options:?} wrote no gateway.toml: {error}; {written}")
        });
        assert!(
            text.lines().filter(|line| line.starts_with('#')).count() >= 3,
            "{preset} is commented:\n{text}"
        );
        let printed = tidegate(folder.path(), &["init", "--preset", preset]);
        assert_eq!(
            (printed.code, printed.stdout.as_str()),
            (Some(0), text.as_str()),
            "{preset}, printed"
        );
        let checked = tidegate(folder.path(), &["check", "--config", "gateway.toml"]);
        assert_eq!(checked.code, Some(0), "{preset}: {checked}\n{text}");
    }
}

#[test]
fn init_never_overwrites() {
    let folder = folder();
    write(folder.path(), "precious");
    let refused = tidegate(folder.path(), &["init", "--output", "gateway.toml"]);
    assert_eq!(refused.code, Some(1), "{refused}");
    assert!(refused.stderr.contains("gateway.toml"), "{refused}");
    assert_eq!(
        fs::read_to_string(folder.path().join("gateway.toml"))
            .ok()
            .as_deref(),
        Some("precious")
    );
}

#[test]
fn the_example_configuration_passes_check() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/gateway.toml.example");
    let folder = folder();
    let checked = tidegate(folder.path(), &["check", "--config", example]);
    assert_eq!(checked.code, Some(0), "{checked}");
}

/// Copies the files that configurations in the documentation name.
fn copy_files(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).expect("the folder is there") {
        let entry = entry.expect("it can be listed");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("a writable folder");
    }
}

#[test]
fn every_configuration_in_the_documentation_passes_check() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages = vec![root.join("README.md")];
    pages.extend(
        fs::read_dir(root.join("docs"))
            .expect("docs")
            .map(|entry| entry.expect("an entry of docs").path()),
    );
    let mut checked = 0;
    for page in pages
        .iter()
        .filter(|page| page.extension().is_some_and(|extension| extension == "md"))
    {
        let text =
            fs::read_to_string(page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        for block in text.split("```toml\n").skip(1) {
            let toml = block.split("```").next().unwrap_or_default();
            let folder = folder();
            write(folder.path(), toml);
            copy_files(&root.join("tests/config/valid/files"), folder.path());
            let finished = tidegate(folder.path(), &["check", "--config", "gateway.toml"]);
            assert_eq!(
                finished.code,
                Some(0),
                "{}: {finished}\n{toml}",
                page.display()
            );
            checked += 1;
        }
    }
    assert!(checked >= 1, "no configuration was found");
}

#[test]
fn healthcheck_is_0_when_ready_and_1_when_nobody_answers() {
    let gateway = Gateway::with("").start();
    let admin = format!("http://{}", gateway.admin_address());
    let healthy = tidegate(gateway.folder(), &["healthcheck", "--admin", &admin]);
    assert_eq!(healthy.code, Some(0), "{healthy}");

    let nobody = format!("http://{}", crate::support::origin::nobody());
    let unhealthy = tidegate(gateway.folder(), &["healthcheck", "--admin", &nobody]);
    assert_eq!(unhealthy.code, Some(1), "{unhealthy}");
    assert!(!unhealthy.stderr.is_empty(), "it says why");
}

#[test]
fn hash_key_prints_the_entry_that_lets_the_key_in() {
    let folder = folder();
    let hash = |arguments: &[&str], key: &[u8]| {
        finish(
            tidegate_command(folder.path())
                .arg("hash-key")
                .args(arguments),
            key,
        )
    };
    let key = "4f1c2a7d-a-key-of-some-length";
    let finished = hash(&["acme", "--tier", "pro"], format!("{key}\n").as_bytes());
    assert_eq!(finished.code, Some(0), "{finished}");
    assert_eq!(finished.stderr, "");
    assert!(!finished.stdout.contains(key), "{finished}");
    let user = "[[user]]\nfrom = \"api_key\"\nkeys_file = \"keys.toml\"\n";
    let origin = Origin::ok();
    let gateway = Gateway::with(user)
        .file("keys.toml", &finished.stdout)
        .upstream(&origin)
        .start();
    let send = |key: &str| {
        gateway
            .send(&Request::get("/").header("x-api-key", key))
            .status
    };
    assert_eq!((send(key), send("another")), (200, 401));
    let seen = origin.request();
    assert_eq!(seen.header("x-user-id"), Some("acme"));
    assert_eq!(seen.header("x-rate-limit-tier"), Some("pro"));

    // a name that TOML would read as two keys
    let quoted = hash(&["a.b", "--user", "say \"hi\""], key.as_bytes());
    assert!(quoted.stdout.starts_with("[keys.\"a.b\"]\n"), "{quoted}");
    assert!(quoted.stdout.contains(r#"user = "say \"hi\"""#), "{quoted}");
}

#[test]
fn hash_key_refuses_what_no_request_can_carry() {
    let folder = folder();
    for key in ["", "\n", " key", "two\nlines", &"k".repeat(1025)] {
        let finished = finish(
            tidegate_command(folder.path()).arg("hash-key"),
            key.as_bytes(),
        );
        assert_eq!(finished.code, Some(1), "{key:?}: {finished}");
        assert!(
            finished.stdout.is_empty() && finished.stderr.starts_with("error: "),
            "{finished}"
        );
    }
    let short = finish(tidegate_command(folder.path()).arg("hash-key"), b"hunter2");
    assert_eq!(short.code, Some(0), "{short}");
    assert!(
        short.stderr.contains("warning") && !short.stderr.contains("hunter2"),
        "{short}"
    );
}

#[test]
fn a_hundred_thousand_api_keys_load() {
    let folder = folder();
    let keys: String = (0..100_000)
        .map(|number| format!("[keys.k{number}]\nsha256 = \"{number:064x}\"\n"))
        .collect();
    fs::write(folder.path().join("keys.toml"), keys).expect("a temporary folder is writable");
    write(
        folder.path(),
        &format!("{SOUND}\n[[user]]\nfrom = \"api_key\"\nkeys_file = \"keys.toml\"\n"),
    );
    let started = std::time::Instant::now();
    let loaded = tidegate::config::load(&folder.path().join("gateway.toml"));
    let snapshot = loaded.expect("it is valid").snapshot;
    let identifier = tidegate::identity::Identifier::new(&snapshot.identity);
    println!("100,000 API keys load in {:?}", started.elapsed());
    drop(identifier);
    let tidegate::identity::UserSource::ApiKey { keys, .. } = &snapshot.identity.users[0] else {
        panic!("API keys")
    };
    assert_eq!(keys.len(), 100_000);
}
