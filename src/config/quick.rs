//! Builds a configuration from the command line, `tidegate run --to URL --limit RATE`.

use super::{compile::parse_server, diagnostic::PendingDiagnostic, units};

/// The text of the configuration. It is compiled like any other file, with the same diagnostics.
///
/// Its one limit is named `default` and counts by client address.
pub fn quick(to: &str, limit: &str, listen: Option<&str>, admin: Option<&str>) -> String {
    let admin = admin.map(|address| format!("[admin]\naddress = {}\n\n", toml_string(address)));
    format!(
        r#"[[listen]]
address = {listen}

{admin}[upstream.default]
servers = [{to}]

[limit.default]
key = ["ip"]
rate = {limit}

[gateway]
limits = ["default"]

[[route]]
name = "default"
path = "/{{*rest}}"
upstream = "default"
"#,
        listen = toml_string(listen.unwrap_or("127.0.0.1:8080")),
        admin = admin.unwrap_or_default(),
        to = toml_string(to),
        limit = toml_string(limit),
    )
}

/// Checks the server of `--to` first, so that an error names the option and not a generated file.
pub fn parse_to(text: &str) -> Result<String, String> {
    checked(text, parse_server(text))
}

/// Checks the rate of `--limit`, likewise.
pub fn parse_limit(text: &str) -> Result<String, String> {
    checked(text, units::rate(text))
}

fn checked<T>(text: &str, parsed: Result<T, PendingDiagnostic>) -> Result<String, String> {
    let said = |problem: PendingDiagnostic| match problem.hint.as_str() {
        "" => problem.message,
        hint => format!("{}; {hint}", problem.message),
    };
    parsed.map(|_| text.to_owned()).map_err(said)
}

/// A TOML basic string (TOML 1.0, "String") with exactly this text.
fn toml_string(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted.replace("${", "$${")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::{Code, compile};

    fn burst(limit: &str) -> u64 {
        let text = quick("http://localhost:3000", limit, None, None);
        let loaded = compile("command line", &text, Path::new(""), &|_| None).expect("it compiles");
        assert!(loaded.warnings.is_empty(), "{}", loaded.warnings);
        loaded.snapshot.limits[0].quotas[0].burst.get()
    }

    #[test]
    fn the_limit_has_the_burst_that_it_would_have_in_a_file() {
        assert_eq!(
            [
                burst("60/min"),
                burst("5/min"),
                burst("100/s"),
                burst("1/s")
            ],
            [10, 5, 100, 1]
        );
    }

    #[test]
    fn addresses_are_those_that_were_asked_for() {
        let text = quick(
            "builtin:echo",
            "1/s",
            Some("127.0.0.1:0"),
            Some("127.0.0.1:9999"),
        );
        let snapshot = compile("command line", &text, Path::new(""), &|_| None)
            .expect("it compiles")
            .snapshot;
        assert_eq!(snapshot.admin.address.port(), 9999);
    }

    #[test]
    fn nothing_on_the_command_line_becomes_more_than_a_value() {
        let text = quick(
            "http://a\"]\n[server]\nworkers = 1\\ ${HOME}",
            "1/s",
            None,
            None,
        );
        let report =
            compile("command line", &text, Path::new(""), &|_| None).expect_err("it is no server");
        let codes: Vec<Code> = report
            .diagnostics
            .iter()
            .map(|diagnostic| diagnostic.code)
            .collect();
        assert_eq!(codes, [Code::BadAddress], "{report}");
    }
}
