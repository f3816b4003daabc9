//! Runs the guides: the pages whose every command and configuration a reader can copy. The blocks of a page run in order, in
//! one shell and one folder, with the binary under test.
//!
//! Rules of a block, by its language:
//! - `toml`: `tidegate check` accepts it without a warning. With a title it is also written to that file.
//! - `console`: a line behind `$ ` is a command, also over several lines (`\` at the end, or `> ` before the next). It must end
//!   with 0. Lines below it are its output: `…` stands for any text, and alone on a line for any lines. Request ids and times
//!   may differ.
//! - any other language: not checked, but with a title it is written to that file.
//!
//! The source of a page can contain instructions, each in a comment on one line:
//! - `<!-- test: ports 8080 9901 -->`: the page names these ports; free ones replace them.
//! - `<!-- test: run COMMAND -->`: a command that readers do not need, for example to start a server for the page.
//! - `<!-- test: stop NAME -->`: interrupts the background command NAME, which must end with 0.
//! - before a block: `skip REASON`, `needs PROGRAM` (skipped without it), `file NAME` (a file without a title), `fragment` (part
//!   of a configuration), `error CODE`, `warning CODE`, `exit STATUS`, `background NAME` (waits for the output below it), `repeat` (until the
//!   output below it appears).

mod expected;
mod page;
mod shell;

use std::{fs, path::Path};

use page::{Instruction, Piece};
use shell::Shell;

/// Why a console block may not be run.
const REASONS: &[&str] = &[
    "needs Docker",
    "needs systemd",
    "needs root",
    "needs the internet",
    "needs a running service",
    "another product",
];

/// What the blocks of some pages were used for.
#[derive(Debug, Default)]
struct Tally {
    configurations: usize,
    run: usize,
    skipped: usize,
}

/// Runs one page.
fn follow(name: &str) -> Tally {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    let text = fs::read_to_string(path).expect("the page can be read");
    run(name, &text).unwrap_or_else(|problem| panic!("{name}:{problem}"))
}

/// Runs the text of a page. A failure begins with the line of its block.
fn run(name: &str, text: &str) -> Result<Tally, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let frame = fs::read_to_string(root.join("docs/.frame.toml")).expect("the frame can be read");
    let (pieces, ports) = page::read(text)?;
    let mut shell = Shell::start(&ports);
    let mut tally = Tally::default();
    for piece in &pieces {
        let outcome = match piece {
            Piece::Run(command) => shell.run(command, 0).map(drop),
            Piece::Stop(background) => shell.stop(background),
            Piece::Block(block) => match block.instructions.iter().find_map(unmet) {
                Some(reason) => {
                    eprintln!("SKIPPED {name}:{}: {reason}", block.line);
                    tally.skipped += usize::from(block.language == "console");
                    Ok(())
                }
                None => {
                    tally.configurations += usize::from(block.language == "toml");
                    tally.run += usize::from(block.language == "console");
                    block.apply(&mut shell, &frame)
                }
            },
        };
        outcome.map_err(|problem| format!("{}: {problem}", piece.line()))?;
    }
    Ok(tally)
}

/// Why a block cannot be run here.
fn unmet(instruction: &Instruction) -> Option<String> {
    match instruction {
        Instruction::Skip(reason) => Some(reason.clone()),
        Instruction::Needs(program) if !shell::is_installed(program) => {
            Some(format!("{program} is not installed"))
        }
        _ => None,
    }
}

macro_rules! guides {
    ($($test:ident: $page:literal,)*) => {
        const GUIDES: &[&str] = &[$($page),*];
        $(#[test]
        fn $test() {
            let tally = follow($page);
            let seen = tally.configurations + tally.run + tally.skipped;
            assert!(seen > 0, "{}: no configuration and no command", $page);
        })*
    };
}

guides! {
    the_index: "docs/index.md",
    the_first_limit: "docs/tutorial/first-limit.md",
    two_gateways: "docs/tutorial/two-gateways.md",
    behind_a_load_balancer: "docs/how-to/behind-a-load-balancer.md",
    shadow_to_enforce: "docs/how-to/shadow-to-enforce.md",
    plans_and_overrides: "docs/how-to/plans-and-overrides.md",
    protect_a_login: "docs/how-to/protect-a-login.md",
    api_keys: "docs/how-to/api-keys.md",
    jwt: "docs/how-to/jwt.md",
    redis_ha: "docs/how-to/redis-ha.md",
    tls: "docs/how-to/tls.md",
    systemd: "docs/how-to/systemd.md",
    containers: "docs/how-to/containers.md",
    monitoring: "docs/how-to/monitoring.md",
    at_3_am: "docs/how-to/at-3-am.md",
    honour_a_429: "docs/how-to/honour-a-429.md",
    what_happens_to_a_request: "docs/explanation/what-happens-to-a-request.md",
    upgrade: "docs/upgrade.md",
    from_nginx: "docs/migration/nginx.md",
    from_ingress_nginx: "docs/migration/ingress-nginx.md",
    from_haproxy: "docs/migration/haproxy.md",
    from_traefik: "docs/migration/traefik.md",
    from_kong: "docs/migration/kong.md",
    from_caddy: "docs/migration/caddy.md",
    from_envoy_ratelimit: "docs/migration/envoy-ratelimit.md",
    from_express_rate_limit: "docs/migration/express-rate-limit.md",
}

#[test]
fn every_page_with_commands_or_configurations_is_followed() {
    let folders = [
        "docs/tutorial",
        "docs/how-to",
        "docs/explanation",
        "docs/migration",
    ];
    let pages = crate::pages();
    let (mut run, mut skipped) = (0, 0);
    for (name, text) in &pages {
        let added = folders.iter().any(|folder| name.starts_with(folder));
        let blocks = text.contains("```console\n") || text.contains("```toml");
        if added && blocks {
            assert!(
                GUIDES.contains(&name.as_str()),
                "{name} is not in `guides!`"
            );
        }
        if GUIDES.contains(&name.as_str()) {
            let blocks = text.split("```console\n").count() - 1;
            let left_out = text.matches("<!-- test: skip ").count();
            run += blocks - left_out.min(blocks);
            skipped += left_out;
        }
    }
    assert!(
        skipped * 100 <= (run + skipped) * 15,
        "{skipped} of {} blocks are not run",
        run + skipped
    );
}

#[test]
fn a_planted_error_of_each_kind_is_found() {
    let console = |text: &str| format!("```console\n$ {text}\n```\n");
    let toml = "[upstream.a]\nservers = [\"builtin:echo\"]\n[limit.l]\nkey = [\"ip\"]\nrate = \"1/s\"\n\
        [gateway]\nlimits = [\"l\"]\n[[route]]\nname = \"r\"\npath = \"/{*rest}\"\nupstream = \"a\"\n";
    let block = |toml: &str| format!("```toml\n{toml}```\n");
    let sound = [
        console("echo a; false || true\na"),
        block(toml),
        format!(
            "<!-- test: fragment -->\n{}",
            block("[client_ip]\nheader = \"none\"\n")
        ),
        format!(
            "<!-- test: error TG0101 -->\n{}",
            block(&toml.replace("rate", "rat"))
        ),
        format!(
            "<!-- test: exit 3 -->\n{}",
            console("exit_with() { return 3; }; exit_with")
        ),
        format!("<!-- test: background a -->\n{}", console("sleep 60")),
    ];
    for text in &sound {
        assert!(
            run("sound", text).is_ok(),
            "{text}: {:?}",
            run("sound", text).err()
        );
    }
    let wrong = [
        console("echo a\nb"),
        console("echo a\na\nb"),
        console("false"),
        console("no-such-command"),
        block(&toml.replace("key =", "kye =")),
        block(&toml.replace("[\"ip\"]", "[\"header:x\"]")),
        format!("<!-- test: error TG0101 -->\n{}", block(toml)),
        format!("<!-- test: exit 3 -->\n{}", console("true")),
        format!("<!-- test: background a -->\n{}", console("echo b\na")),
        "<!-- test: run tidegate run missing.toml -->\n".to_owned(),
        "<!-- test: stop nothing -->\n".to_owned(),
        "<!-- test: unknown -->\n".to_owned(),
    ];
    for text in &wrong {
        assert!(run("wrong", text).is_err(), "{text}");
    }
}
