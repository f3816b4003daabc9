//! `tidegate init`: writes a commented starter gateway.toml.

use std::{
    fs::OpenOptions,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, ValueEnum};

/// Arguments of `tidegate init`.
#[derive(Clone, Debug, Args)]
pub struct InitArgs {
    /// The kind of service to protect
    #[arg(long, value_enum, default_value_t)]
    pub preset: Preset,
    /// Write to this new file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// The kinds of service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    /// A public HTTP API with API keys and plans
    #[default]
    Api,
    /// A website whose login must resist password guessing
    Login,
    /// A language model with a budget per user
    Llm,
    /// An internal service that only other services call
    Internal,
}

impl Preset {
    /// The text of the preset; it passes `tidegate check` unchanged.
    pub fn text(self) -> &'static str {
        match self {
            Self::Api => include_str!("presets/api.toml"),
            Self::Login => include_str!("presets/login.toml"),
            Self::Llm => include_str!("presets/llm.toml"),
            Self::Internal => include_str!("presets/internal.toml"),
        }
    }
}

/// Prints or writes the preset. Exits 1 if the file exists or cannot be written.
pub fn init(args: &InitArgs) -> ExitCode {
    let written = match &args.output {
        Some(path) => write_new(path, args.preset.text()),
        None => io::stdout()
            .write_all(args.preset.text().as_bytes())
            .map_err(|error| error.to_string()),
    };
    let message = match (&written, &args.output) {
        (Ok(()), Some(path)) => {
            let path = path.display();
            format!(
                "wrote {path}; next, put your server into [upstream] and run `tidegate check --config {path}`"
            )
        }
        (Ok(()), None) => return ExitCode::SUCCESS,
        (Err(error), _) => format!("error: {error}"),
    };
    let _ = writeln!(anstream::stderr(), "{message}");
    if written.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn write_new(path: &Path, text: &str) -> Result<(), String> {
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => format!(
                "{} already exists and was not changed; name another file",
                path.display()
            ),
            _ => format!("{} cannot be written: {error}", path.display()),
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn every_preset_passes_check_without_a_warning() {
        for preset in Preset::value_variants() {
            let loaded = config::compile("preset", preset.text(), Path::new(""), &|_| None);
            let loaded = loaded.unwrap_or_else(|report| panic!("{preset:?}:\n{report}"));
            assert!(
                loaded.warnings.is_empty(),
                "{preset:?}:\n{}",
                loaded.warnings
            );
        }
    }

    #[test]
    fn a_file_that_exists_is_left_as_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gateway.toml");
        assert_eq!(write_new(&path, "first"), Ok(()));
        assert!(write_new(&path, "second").is_err_and(|error| error.contains("exists")));
        assert_eq!(std::fs::read_to_string(path).expect("it is there"), "first");
    }
}
