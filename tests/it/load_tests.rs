//! What the load tests stand on, where k6 is not: their configuration is valid, and each of them has a fault that it finds.

use std::{fs, path::Path};

use crate::support::tidegate;

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
