//! Preconditions of the load tests, checked without k6: their configuration is valid, and each
//! detects a planted fault.

use std::{env, fs, os::unix::fs::symlink, path::Path, process::Command};

use crate::support::{cli::finish, gateway::piped, tidegate};

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn the_gateways_of_the_load_tests_have_a_valid_configuration() {
    let checked = tidegate(Path::new("."), &["check", "load/config/gateway.toml"]);
    assert_eq!(checked.code, Some(0), "{checked}");
}

#[test]
fn every_load_test_has_a_fault_that_it_finds_and_that_can_be_made() {
    let (table, runner) = (read("load/README.md"), read("scripts/load"));
    // | `script` | `fault` | `threshold` | words |
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.split('`').skip(1).step_by(2).collect())
        .filter(|row: &Vec<&str>| row.len() == 3 && row[0] != "script")
        .collect();
    for entry in fs::read_dir("load/k6").expect("the scripts") {
        let path = entry.expect("an entry").path();
        let Some(script) = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_suffix(".js"))
        else {
            continue;
        };
        let faults: Vec<_> = rows.iter().filter(|row| row[0] == script).collect();
        assert!(
            !faults.is_empty(),
            "load/README.md has no fault for {script}"
        );
        assert!(
            runner.contains(script),
            "scripts/load does not name {script}"
        );
        let text = read(&path.to_string_lossy());
        for row in faults {
            let made = [format!(" {})", row[1]), format!(" {} |", row[1])];
            assert!(made.iter().any(|made| runner.contains(made)), "{row:?}");
            let metric = row[2].split('{').next().unwrap_or_default();
            assert!(
                text.contains(metric) || text.contains("...ALWAYS"),
                "{row:?}"
            );
        }
    }
    assert!(rows.len() > 11, "{rows:?}");
}

#[test]
fn the_compose_file_knows_the_token_of_its_gateways() {
    let token = read("load/config/admin.token");
    assert!(read("docker-compose.yml").contains(&format!("ADMIN_TOKEN: \"{}\"", token.trim())));
}

/// Cargo requires all tests and benches in the manifest that have no path, even if it builds none
/// of them.
#[test]
fn the_image_is_built_from_files_that_cargo_takes_for_the_whole_package() {
    let folder = tempfile::tempdir().expect("a folder");
    let (dockerfile, sent) = (read("Dockerfile"), read(".dockerignore"));
    let copied: Vec<&str> = dockerfile
        .lines()
        .filter(|line| line.starts_with("COPY ") && !line.contains("--from="))
        .flat_map(|line| {
            let words: Vec<&str> = line.split_whitespace().skip(1).collect();
            words[..words.len() - 1].to_vec()
        })
        .collect();
    assert!(copied.contains(&"src"), "{copied:?}");
    for name in copied {
        assert!(
            sent.lines().any(|line| line == format!("!{name}")),
            ".dockerignore keeps {name} from the build"
        );
        let path = fs::canonicalize(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        symlink(path, folder.path().join(name)).expect("a link");
    }
    // Cargo reads the manifest before it searches the program, so nothing is built
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let arguments = ["build", "--locked", "--offline", "--bin", "none-such"];
    let read = finish(
        piped(&mut cargo)
            .args(arguments)
            .current_dir(folder.path())
            .env("CARGO_TARGET_DIR", folder.path().join("target")),
        b"",
    );
    let wanted = "no bin target named `none-such`";
    assert!(read.stderr.contains(wanted), "{read}");
}
