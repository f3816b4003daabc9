//! What a person types: one variant, one file each.
//!
//! Exit codes: 0 fine, 1 findings or failure, 2 usage.

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand};

pub mod admin;
pub mod check;
pub mod explain;
pub mod hash_key;
pub mod healthcheck;
pub mod init;
pub mod run;
pub mod top;

/// A rate-limiting reverse proxy that protects an origin from being overrun.
#[derive(Debug, Parser)]
#[command(
    name = "tidegate",
    version,
    arg_required_else_help = true,
    after_help = "Start with: tidegate run --to http://localhost:3000 --limit 60/min"
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve: from a configuration file, or without one from --to and --limit.
    Run(run::RunArgs),
    /// Check a configuration: every problem, with its place and how to mend it.
    Check(check::CheckArgs),
    /// Show what becomes of a request, and why: its client, its route, each limit. Offline, or of a gateway that runs.
    Explain(explain::ExplainArgs),
    /// Show what a gateway that runs does at the moment, and whom it rejects most.
    Top(top::TopArgs),
    /// Write a commented configuration to start from.
    Init(init::InitArgs),
    /// Print the entry of a keys file for an API key, which is read and neither shown nor kept.
    HashKey(hash_key::HashKeyArgs),
    /// Exit 0 when a running gateway is ready (for containers that have no curl).
    Healthcheck(healthcheck::HealthcheckArgs),
}

/// Which configuration file is meant.
#[derive(Clone, Debug, Args)]
pub struct ConfigFile {
    /// The configuration file [env: TIDEGATE_CONFIG] [default: gateway.toml]
    #[arg(value_name = "FILE", conflicts_with = "config")]
    file: Option<PathBuf>,
    /// The same, as an option
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl ConfigFile {
    /// As it was named, else as the environment names it, else the one in the current folder. clap does not read the
    /// variable, since one that is set would then exclude the options that do without a file.
    pub fn path(&self) -> PathBuf {
        let named = self.file.as_ref().or(self.config.as_ref()).cloned();
        let of_environment = || {
            let path = std::env::var_os("TIDEGATE_CONFIG")?;
            (!path.is_empty()).then(|| path.into())
        };
        named
            .or_else(of_environment)
            .unwrap_or_else(|| "gateway.toml".into())
    }
}

/// Parses the command line and does what it says.
pub fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Check(args) => check::check(&args),
        Command::Explain(args) => explain::explain(&args),
        Command::Top(args) => top::top(&args),
        Command::Init(args) => init::init(&args),
        Command::HashKey(args) => hash_key::hash_key(&args),
        Command::Healthcheck(args) => healthcheck::healthcheck(&args),
    }
}
