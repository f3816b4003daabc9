//! `tidegate check`: compiles a configuration and prints every problem with its location, its line
//! and a hint.

use std::{io::Write, path::Path, process::ExitCode};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::config_file::ConfigFile;
use crate::config::{self, DiagnosticReport, LoadedConfig, Snapshot, count};

/// Arguments of `tidegate check`.
#[derive(Clone, Debug, Args)]
pub struct CheckArgs {
    /// The file to check
    #[command(flatten)]
    pub config: ConfigFile,
    /// How to print the problems
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// The output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people
    #[default]
    Text,
    /// One JSON object
    Json,
}

/// Checks a file: exits 0 if it can be used, even with warnings, and 1 if not.
pub fn check(args: &CheckArgs) -> ExitCode {
    let path = args.config.path();
    let result = config::load(&path);
    match args.format {
        Format::Text => print_text(&path, &result),
        Format::Json => print_line(&mut std::io::stdout(), &json(&result).to_string()),
    }
    if result.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Problems go to standard error, the success line to standard output.
fn print_text(path: &Path, result: &Result<LoadedConfig, DiagnosticReport>) {
    let report = match result {
        Ok(loaded) => &loaded.warnings,
        Err(report) => report,
    };
    let mut stderr = anstream::stderr();
    if !report.is_empty() {
        print_line(&mut stderr, report.text(true).trim_end());
    }
    match result {
        Ok(loaded) => print_line(&mut std::io::stdout(), &verdict(path, loaded)),
        Err(report) => print_line(&mut stderr, &report.summary()),
    }
}

/// Ignores a closed pipe (`check | head`): it is not a failure of the check.
fn print_line(to: &mut impl Write, line: &str) {
    let _ = writeln!(to, "{line}");
}

fn json(result: &Result<LoadedConfig, DiagnosticReport>) -> Value {
    match result {
        Ok(loaded) => {
            let mut report = loaded.warnings.json();
            report["ok"] = json!(true);
            report["summary"] = json!(contents(&loaded.snapshot));
            report
        }
        Err(report) => {
            let mut json = report.json();
            json["ok"] = json!(false);
            json["summary"] = json!(report.summary());
            json
        }
    }
}

/// `gateway.toml: fine, 1 warning: 1 listener, 3 routes, 4 limits`.
fn verdict(path: &Path, loaded: &LoadedConfig) -> String {
    let warnings = match loaded.warnings.summary() {
        none if none.is_empty() => none,
        some => format!(", {some}"),
    };
    format!(
        "{}: fine{warnings}: {}",
        path.display(),
        contents(&loaded.snapshot)
    )
}

fn contents(snapshot: &Snapshot) -> String {
    let counted = [
        (snapshot.listeners.len(), "listener"),
        (snapshot.routes.len(), "route"),
        (snapshot.limits.len(), "limit"),
    ];
    counted.map(|(n, noun)| count(n, noun)).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compile(text: &str) -> Result<LoadedConfig, DiagnosticReport> {
        config::compile("gateway.toml", text, Path::new(""), &|_| None)
    }

    #[test]
    fn a_good_file_is_told_what_it_holds() {
        let text = config::quick("builtin:echo", "1/s", None, None);
        let loaded = compile(&text).expect("it compiles");
        let verdict = verdict(Path::new("gateway.toml"), &loaded);
        assert_eq!(verdict, "gateway.toml: fine: 1 listener, 1 route, 1 limit");
    }

    #[test]
    fn json_says_whether_the_file_can_be_used() {
        let bad = json(&compile("nonsense = 1"));
        let places: Vec<&Value> = ["line", "column"]
            .iter()
            .map(|key| &bad["diagnostics"][2][key])
            .collect();
        assert_eq!((&bad["ok"], &bad["errors"]), (&json!(false), &json!(3)));
        assert_eq!(places, [1, 1]);
        let good = json(&compile(&config::quick("builtin:echo", "1/s", None, None)));
        assert_eq!((&good["ok"], &good["errors"]), (&json!(true), &json!(0)));
    }
}
