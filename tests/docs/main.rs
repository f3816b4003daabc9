//! Tests of the documentation: its language, its links, and the guides, whose commands and configurations are run. The tests
//! that compare it with the code are beside that code and in `tests/it`.

use std::{fs, path::Path};

mod blocks;
mod guide;
mod links;
mod prose;
mod site;

const PAGES: &[&str] = &[
    "ARCHITECTURE.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/README.md",
    "load/README.md",
];
const FOLDERS: &[&str] = &[
    "docs",
    "docs/decisions",
    "docs/explanation",
    "docs/how-to",
    "docs/migration",
    "docs/tutorial",
];

/// Name and text of every page.
fn pages() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names: Vec<String> = PAGES.iter().map(|&name| name.to_owned()).collect();
    for folder in FOLDERS {
        let entries = fs::read_dir(root.join(folder)).expect("the folder is there");
        let files = entries.map(|entry| entry.expect("it can be listed").file_name());
        let files = files.map(|file| file.to_string_lossy().into_owned());
        names.extend(
            files
                .filter(|file| file.ends_with(".md"))
                .map(|file| format!("{folder}/{file}")),
        );
    }
    names.sort();
    let read = |name: &String| fs::read_to_string(root.join(name)).expect("it can be read");
    names
        .iter()
        .map(|name| (name.clone(), read(name)))
        .collect()
}
