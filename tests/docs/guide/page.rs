//! Reads a guide into the pieces that are run.

use super::{
    REASONS,
    expected::Expected,
    shell::{Shell, free_port},
};

#[derive(Debug, PartialEq)]
pub(super) enum Instruction {
    Skip(String),
    Needs(String),
    File(String),
    Fragment,
    Error(String),
    Warning(String),
    Exit(i32),
    Background(String),
    Repeat,
}

#[derive(Debug)]
pub(super) enum Piece {
    Run(Command),
    Stop(Command),
    Block(Block),
}

#[derive(Debug)]
pub(super) struct Command {
    pub(super) line: usize,
    pub(super) text: String,
    /// The lines below a command of a console block.
    pub(super) output: Expected,
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) line: usize,
    pub(super) language: String,
    pub(super) instructions: Vec<Instruction>,
    text: String,
}

impl Piece {
    pub(super) fn line(&self) -> usize {
        match self {
            Piece::Run(command) | Piece::Stop(command) => command.line,
            Piece::Block(block) => block.line,
        }
    }
}

/// The pieces of a page in their order. An error begins with its line.
pub(super) fn read(text: &str) -> Result<(Vec<Piece>, Ports), String> {
    let mut pieces = Vec::new();
    let mut instructions = Vec::new();
    let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line));
    while let Some((line, content)) = lines.next() {
        if let Some(fence) = content.strip_prefix("```") {
            let (language, title) = fence.split_once(' ').unwrap_or((fence, ""));
            let title = title
                .strip_prefix("title=\"")
                .map(|title| title.trim_end_matches('"'));
            instructions.extend(title.map(|title| Instruction::File(title.to_owned())));
            let body: Vec<&str> = lines
                .by_ref()
                .map(|(_, line)| line)
                .take_while(|&line| line != "```")
                .collect();
            pieces.push(Piece::Block(Block {
                line,
                language: language.to_owned(),
                instructions: std::mem::take(&mut instructions),
                text: body.join("\n") + "\n",
            }));
        } else if let Some(comment) = content.strip_prefix("<!-- test: ") {
            let comment = comment
                .strip_suffix(" -->")
                .ok_or(format!("{line}: the comment does not end"))?;
            let (verb, rest) = comment.split_once(' ').unwrap_or((comment, ""));
            let command = || Command {
                line,
                text: rest.to_owned(),
                output: Expected::anything(),
            };
            match verb {
                "ports" => {}
                "run" => pieces.push(Piece::Run(command())),
                "stop" => pieces.push(Piece::Stop(command())),
                _ => instructions
                    .push(instruction(verb, rest).ok_or(format!("{line}: unknown: {comment}"))?),
            }
        } else if !content.trim().is_empty() && !instructions.is_empty() {
            return Err(format!(
                "{line}: an instruction stands directly before its block"
            ));
        }
    }
    let ports = Ports::read(text);
    let pieces = pieces
        .into_iter()
        .map(|piece| piece.with_ports(&ports))
        .collect();
    Ok((pieces, ports))
}

fn instruction(verb: &str, rest: &str) -> Option<Instruction> {
    let text = rest.to_owned();
    Some(match verb {
        "skip" if REASONS.contains(&rest) => Instruction::Skip(text),
        "needs" => Instruction::Needs(text),
        "file" => Instruction::File(text),
        "fragment" => Instruction::Fragment,
        "error" => Instruction::Error(text),
        "warning" => Instruction::Warning(text),
        "exit" => Instruction::Exit(rest.parse().ok()?),
        "background" => Instruction::Background(text),
        "repeat" => Instruction::Repeat,
        _ => return None,
    })
}

/// The ports that a page names, each with a free one that replaces it.
pub(super) struct Ports(Vec<(String, String)>);

impl Ports {
    fn read(text: &str) -> Self {
        let named = text
            .lines()
            .filter_map(|line| line.strip_prefix("<!-- test: ports "));
        let named = named.flat_map(|rest| rest.trim_end_matches(" -->").split(' '));
        Self(
            named
                .map(|port| (port.to_owned(), free_port().to_string()))
                .collect(),
        )
    }

    /// The port that replaces this one, or a free one if the page does not name it.
    pub(super) fn instead_of(&self, port: &str) -> String {
        let replaced = self.0.iter().find(|(named, _)| named == port);
        replaced.map_or_else(|| free_port().to_string(), |(_, free)| free.clone())
    }

    /// Replaces the ports in a text, as whole numbers.
    fn replace(&self, text: &str) -> String {
        let mut changed = String::new();
        let mut number = String::new();
        for c in text.chars().chain(['\0']) {
            if c.is_ascii_digit() {
                number.push(c);
                continue;
            }
            let port = self.0.iter().find(|(port, _)| *port == number);
            changed.push_str(port.map_or(&number, |(_, free)| free));
            number.clear();
            changed.push(c);
        }
        changed.pop();
        changed
    }
}

impl Piece {
    fn with_ports(self, ports: &Ports) -> Piece {
        let command = |command: Command| Command {
            text: ports.replace(&command.text),
            ..command
        };
        match self {
            Piece::Run(run) => Piece::Run(command(run)),
            Piece::Stop(stop) => Piece::Stop(command(stop)),
            Piece::Block(block) => Piece::Block(Block {
                text: ports.replace(&block.text),
                ..block
            }),
        }
    }
}

impl Block {
    /// Runs the block, or writes and checks it.
    pub(super) fn apply(&self, shell: &mut Shell, frame: &str) -> Result<(), String> {
        let file = self
            .instructions
            .iter()
            .find_map(|instruction| match instruction {
                Instruction::File(name) => Some(name.as_str()),
                _ => None,
            });
        if let Some(file) = file {
            shell.write(file, &self.text)?;
        }
        match self.language.as_str() {
            "toml" => self.check(shell, frame, file),
            "console" => self.run(shell),
            _ => Ok(()),
        }
    }

    fn check(&self, shell: &mut Shell, frame: &str, file: Option<&str>) -> Result<(), String> {
        let fragment = self.instructions.contains(&Instruction::Fragment);
        let text = if fragment {
            format!("{}\n{frame}", self.text)
        } else {
            self.text.clone()
        };
        // a file of another kind, such as a keys file, is checked by the configuration that names it
        if file.is_some_and(|file| !file.contains("gateway")) {
            return Ok(());
        }
        let code = self
            .instructions
            .iter()
            .find_map(|instruction| match instruction {
                Instruction::Error(code) => Some((1, code.as_str())),
                Instruction::Warning(code) => Some((0, code.as_str())),
                _ => None,
            });
        match file {
            Some(file) if !fragment => shell.check(file, &text, code),
            _ => shell.check(".checked.toml", &text, code),
        }
    }

    fn run(&self, shell: &mut Shell) -> Result<(), String> {
        let mut status = 0;
        let (mut repeat, mut background) = (false, None);
        for instruction in &self.instructions {
            match instruction {
                Instruction::Exit(code) => status = *code,
                Instruction::Repeat => repeat = true,
                Instruction::Background(name) => background = Some(name),
                _ => {}
            }
        }
        for command in self.commands()? {
            match background {
                Some(name) => shell.start_background(name, &command)?,
                None if repeat => shell.repeat(&command)?,
                None => shell.run(&command, status)?,
            }
        }
        Ok(())
    }

    fn commands(&self) -> Result<Vec<Command>, String> {
        let mut commands: Vec<Command> = Vec::new();
        let mut continues = false;
        for (at, line) in self.text.lines().enumerate() {
            if let Some(text) = line.strip_prefix("$ ") {
                let text = text.to_owned();
                continues = text.ends_with('\\');
                commands.push(Command {
                    line: self.line + at + 1,
                    text,
                    output: Expected::default(),
                });
                continue;
            }
            let command = commands
                .last_mut()
                .ok_or("a console block begins with a command")?;
            let further = line.strip_prefix("> ").or((line == ">").then_some(""));
            match further {
                Some(further) => command.text += &format!("\n{further}"),
                None if continues => command.text += &format!("\n{line}"),
                None => command.output.push(line),
            }
            continues = (continues || further.is_some()) && line.ends_with('\\');
        }
        Ok(commands)
    }
}

#[test]
fn a_page_is_read_into_its_pieces() {
    let page = "<!-- test: ports 8080 -->\n\n<!-- test: run touch a -->\n<!-- test: exit 3 -->\n```console\n$ curl \\\n    :8080/80801\n> x\nout\n```\n";
    let (pieces, _) = read(page).expect("it is well formed");
    let [Piece::Run(hidden), Piece::Block(block)] = &pieces[..] else {
        panic!("{pieces:?}")
    };
    assert_eq!((hidden.line, hidden.text.as_str()), (3, "touch a"));
    assert_eq!(block.instructions, [Instruction::Exit(3)]);
    let commands = block.commands().expect("a command");
    let [command] = &commands[..] else {
        panic!("{commands:?}")
    };
    assert!(command.text.starts_with("curl \\\n    :"), "{command:?}");
    assert!(
        command.text.ends_with("/80801\nx") && !command.text.contains(":8080/"),
        "{command:?}"
    );
    for broken in [
        "<!-- test: skip no time -->",
        "<!-- test: exit x -->",
        "<!-- test: repeat -->\ntext",
    ] {
        assert!(read(broken).is_err(), "{broken}");
    }
}
