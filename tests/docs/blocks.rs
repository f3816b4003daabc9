//! Code blocks that no test runs everywhere: YAML must at least nest as YAML does.

use super::pages;

/// A line may be deeper than the one before it only below a key or a list item that opens a block.
fn misplaced(yaml: &str) -> Vec<&str> {
    let mut before: Option<&str> = None;
    let mut found = Vec::new();
    let lines = yaml.lines().filter(|line| {
        let text = line.trim();
        !text.is_empty() && !text.starts_with('#')
    });
    for line in lines {
        let depth = |line: &str| line.len() - line.trim_start().len();
        let opens = |line: &str| {
            let code = line.split(" #").next().unwrap_or(line).trim_end();
            code.ends_with([':', '|', '>']) || code.trim_start().starts_with("- ")
        };
        if before.is_some_and(|before| depth(line) > depth(before) && !opens(before)) {
            found.push(line);
        }
        before = Some(line);
    }
    found
}

#[test]
fn yaml_blocks_nest_below_lines_that_open_a_block() {
    assert_eq!(misplaced("a: 1\n    b: 2\n"), ["    b: 2"]);
    assert!(misplaced("a:\n  b: 2\nc:\n- d: 1\n  e: 2 # x\n").is_empty());
    let mut seen = 0;
    for (page, text) in pages() {
        for block in text.split("```yaml\n").skip(1) {
            let block = block.split("```").next().unwrap_or(block);
            seen += 1;
            let wrong = misplaced(block);
            assert!(wrong.is_empty(), "{page}: wrong indentation: {wrong:#?}");
        }
    }
    assert!(seen >= 2, "only {seen} blocks of YAML were seen");
}
