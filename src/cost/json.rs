//! Reads the numbers at given paths of JSON, in pieces of any size, without storing the text.
//!
//! The scanner follows the structure of a value only along the wanted paths. It skips every other
//! object or array, searching only for brackets and strings. So a large array of numbers or a long
//! string costs one search. Brackets are paired everywhere, with one bit per open bracket.
//!
//! Strings are skipped with their escapes, so JSON inside a string is text. Names match only
//! literally: `"us\u0061ge"` is not `"usage"`. Objects in a top-level array are separate values.
//! Values may follow each other with or without white space, so a growing array and JSON lines read
//! alike. Nothing inside another array is wanted.
//!
//! Bounds: [`MAX_DEPTH`] open brackets, `MAX_NAME_BYTES` of a name, `MAX_MODEL_BYTES` of a
//! model's name, `MAX_NUMBER_CHARS` of a number. Time is
//! linear; nothing is allocated.

use super::{
    counters::{Counter, MAX_MODEL_BYTES, UsageCounters},
    decimal::MAX_NUMBER_CHARS,
    paths::{MAX_NAME_BYTES, NodeIndex, UsagePaths},
};

/// Reading stops at deeper values.
pub const MAX_DEPTH: u32 = 64;

/// Why the rest of a value cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// Not JSON.
    NotJson,
    /// More than [`MAX_DEPTH`] open brackets.
    TooDeep,
}

/// The state between two bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Expects white space or the first byte of a value.
    Value,
    /// After `{`: a name, or the end of the object.
    FirstName,
    /// After `,` in an object.
    NextName,
    InName,
    AfterName,
    InText,
    InNumber,
    /// `true`, `false` or `null`.
    InWord,
    AfterValue,
    /// Inside an unwanted object or array.
    Skipping,
    /// Inside a string of an unwanted object or array.
    SkippingText,
    /// Ignores the rest of the value.
    Unreadable(Unreadable),
}

/// Reads a sequence of JSON values in pieces.
#[derive(Clone, Debug)]
pub(super) struct JsonScanner {
    state: State,
    /// The next byte of a string follows a backslash.
    escaped: bool,
    /// The current name or value must be compared or stored.
    wanted: bool,
    /// The current name, and so its value, is on no wanted path.
    off_path: bool,
    /// The current string or number is too long, or has an escape.
    unusable: bool,
    /// The current value's node in the tree of paths.
    node: NodeIndex,
    /// Open brackets, the innermost in the lowest bit: 1 is `{`, 0 is `[`.
    brackets: u64,
    depth: u32,
    /// While skipping: the depth at which the skipped value ends.
    skip_from: u32,
    /// Completed top-level objects, and whether they are elements of an array.
    objects: u64,
    in_array: bool,
    /// Stored bytes of the current name, number or model.
    kept: u8,
    buffer: [u8; MAX_MODEL_BYTES],
}

impl JsonScanner {
    pub(super) fn new() -> JsonScanner {
        JsonScanner {
            state: State::Value,
            escaped: false,
            wanted: false,
            off_path: false,
            unusable: false,
            node: UsagePaths::ROOT,
            brackets: 0,
            depth: 0,
            skip_from: 0,
            objects: 0,
            in_array: false,
            kept: 0,
            buffer: [0; MAX_MODEL_BYTES],
        }
    }

    /// True before the first byte of a value.
    pub(super) fn is_fresh(&self) -> bool {
        self.state == State::Value && self.depth == 0
    }

    /// Completed top-level objects.
    pub(super) fn objects(&self) -> u64 {
        self.objects
    }

    /// Whether they are elements of an array.
    pub(super) fn in_array(&self) -> bool {
        self.in_array
    }

    /// Why the current value cannot be read further.
    pub(super) fn unreadable(&self) -> Option<Unreadable> {
        match self.state {
            State::Unreadable(why) => Some(why),
            _ => None,
        }
    }

    /// Ends the value. A number at the very end may be cut off, so it is ignored: `5.5` may have
    /// become `5.5e-5`.
    pub(super) fn end(&mut self) {
        self.state = State::Value;
        self.node = UsagePaths::ROOT;
        (self.escaped, self.off_path) = (false, false);
        (self.brackets, self.depth) = (0, 0);
    }

    /// Reads the next piece.
    pub(super) fn feed(&mut self, paths: &UsagePaths, found: &mut UsageCounters, piece: &[u8]) {
        let mut rest = piece;
        while let Some((&byte, tail)) = rest.split_first() {
            rest = match self.state {
                State::Unreadable(_) => return,
                State::InText | State::InName | State::SkippingText => {
                    self.text(paths, found, rest)
                }
                State::Skipping => self.skip(paths, rest),
                State::InNumber if is_number(byte) => self.number(rest),
                State::InNumber => {
                    self.number_ends(paths, found);
                    rest
                }
                State::InWord if byte.is_ascii_alphabetic() => tail,
                State::InWord => {
                    self.value_ends(paths);
                    rest
                }
                _ if is_space(byte) => tail,
                State::Value if is_number(byte) && !matches!(byte, b'+' | b'.' | b'e' | b'E') => {
                    let counter = self.counter(paths);
                    self.begin(
                        State::InNumber,
                        counter.is_some_and(|counter| counter != Counter::Model),
                    );
                    rest
                }
                _ => {
                    self.structure(paths, found, byte);
                    tail
                }
            };
        }
    }

    /// Handles a byte outside names, strings, numbers and literals.
    fn structure(&mut self, paths: &UsagePaths, found: &mut UsageCounters, byte: u8) {
        match (self.state, byte) {
            (State::Value, b'{') => self.open(paths, true),
            (State::Value, b'[') => self.open(paths, false),
            (State::Value | State::AfterValue, b']') if self.top() == Some(false) => {
                self.close(paths);
            }
            (State::Value, b'"') => {
                let is_model = self.counter(paths) == Some(Counter::Model);
                self.begin(State::InText, is_model && found.model().is_none());
            }
            (State::Value, b't' | b'f' | b'n') => self.state = State::InWord,
            (State::FirstName | State::NextName, b'"') => {
                self.begin(State::InName, paths.has_children(self.node));
            }
            (State::FirstName | State::AfterValue, b'}') if self.top() == Some(true) => {
                self.close(paths);
            }
            (State::AfterName, b':') => self.state = State::Value,
            (State::AfterValue, b',') => {
                self.state = match self.top() {
                    Some(true) => State::NextName,
                    _ => State::Value,
                };
            }
            _ => self.state = State::Unreadable(Unreadable::NotJson),
        }
    }

    /// The counter of the current value, if its path is wanted.
    fn counter(&self, paths: &UsagePaths) -> Option<Counter> {
        match self.off_path || self.top() != Some(true) {
            true => None,
            false => paths.counter(self.node),
        }
    }

    /// Whether the innermost open bracket is an object's.
    fn top(&self) -> Option<bool> {
        (self.depth > 0).then_some(self.brackets & 1 == 1)
    }

    fn push(&mut self, is_object: bool) -> bool {
        if self.depth == MAX_DEPTH {
            self.state = State::Unreadable(Unreadable::TooDeep);
            return false;
        }
        self.brackets = (self.brackets << 1) | u64::from(is_object);
        self.depth += 1;
        true
    }

    fn open(&mut self, paths: &UsagePaths, is_object: bool) {
        let is_wanted = match is_object {
            true => !self.off_path && paths.has_children(self.node),
            false => self.depth == 0,
        };
        let before = self.depth;
        if !self.push(is_object) {
            return;
        }
        self.state = match (is_wanted, is_object) {
            (false, _) => {
                self.skip_from = before;
                State::Skipping
            }
            (true, true) => State::FirstName,
            (true, false) => State::Value,
        };
    }

    fn close(&mut self, paths: &UsagePaths) {
        let is_object = self.brackets & 1 == 1;
        self.brackets >>= 1;
        self.depth -= 1;
        self.bracket_ends(paths, is_object);
    }

    /// Ends an object or array after its bracket was removed.
    fn bracket_ends(&mut self, paths: &UsagePaths, is_object: bool) {
        let is_element = self.depth == 1 && self.top() == Some(false);
        self.in_array |= is_element && is_object;
        self.objects += u64::from(is_object && (self.depth == 0 || is_element));
        self.value_ends(paths);
    }

    fn value_ends(&mut self, paths: &UsagePaths) {
        if self.top() == Some(true) && !std::mem::take(&mut self.off_path) {
            self.node = paths.parent(self.node);
        }
        self.state = match self.depth {
            0 => State::Value,
            _ => State::AfterValue,
        };
    }

    fn begin(&mut self, state: State, wanted: bool) {
        self.state = state;
        self.wanted = wanted;
        self.unusable = false;
        self.kept = 0;
    }

    /// Skips to the end of an unwanted value, or of the piece.
    fn skip<'a>(&mut self, paths: &UsagePaths, piece: &'a [u8]) -> &'a [u8] {
        let mut rest = piece;
        while let Some(at) = special(rest) {
            let (byte, tail) = (rest.get(at), rest.get(at + 1..).unwrap_or_default());
            rest = tail;
            match byte {
                Some(b'"') => match memchr::memchr2(b'"', b'\\', rest) {
                    // Fast path: most strings are short, without escapes, and end in the same
                    // piece.
                    Some(end) if rest.get(end) == Some(&b'"') => {
                        rest = rest.get(end + 1..).unwrap_or_default();
                    }
                    _ => {
                        self.begin(State::SkippingText, false);
                        return rest;
                    }
                },
                Some(b'{' | b'[') => {
                    if !self.push(byte == Some(&b'{')) {
                        return rest;
                    }
                }
                _ if self.top() != Some(byte == Some(&b'}')) => {
                    self.state = State::Unreadable(Unreadable::NotJson);
                    return rest;
                }
                _ => {
                    self.brackets >>= 1;
                    self.depth -= 1;
                    if self.depth == self.skip_from {
                        self.bracket_ends(paths, byte == Some(&b'}'));
                        return rest;
                    }
                }
            }
        }
        &[]
    }

    /// Reads a string or a name to its closing quote, or to the end of the piece.
    fn text<'a>(
        &mut self,
        paths: &UsagePaths,
        found: &mut UsageCounters,
        piece: &'a [u8],
    ) -> &'a [u8] {
        let mut rest = piece;
        if std::mem::take(&mut self.escaped) {
            rest = rest.get(1..).unwrap_or_default();
        }
        while let Some(at) = memchr::memchr2(b'"', b'\\', rest) {
            let (before, tail) = rest.split_at(at);
            if tail.first() == Some(&b'"') {
                self.text_ends(paths, found, before);
                return tail.get(1..).unwrap_or_default();
            }
            self.unusable = true;
            match tail.get(2..) {
                Some(tail) => rest = tail,
                None => {
                    self.escaped = true;
                    return &[];
                }
            }
        }
        self.keep(rest);
        &[]
    }

    fn text_ends(&mut self, paths: &UsagePaths, found: &mut UsageCounters, last: &[u8]) {
        let state = self.state;
        // Avoid copying a string that lies within one piece.
        let whole = match (self.wanted && !self.unusable, self.kept) {
            (false, _) => None,
            (true, 0) => Some(last),
            (true, _) => {
                self.keep(last);
                match self.unusable {
                    true => None,
                    false => self.buffer.get(..usize::from(self.kept)),
                }
            }
        };
        match state {
            State::InName => {
                let child = whole
                    .filter(|name| name.len() <= MAX_NAME_BYTES)
                    .and_then(|name| paths.child(self.node, name));
                match child {
                    Some(child) => self.node = child,
                    None => self.off_path = true,
                }
                self.state = State::AfterName;
            }
            State::SkippingText => self.state = State::Skipping,
            _ => {
                if let Some(model) = whole {
                    found.set_model(model);
                }
                self.value_ends(paths);
            }
        }
    }

    fn number<'a>(&mut self, piece: &'a [u8]) -> &'a [u8] {
        let end = piece.iter().position(|&byte| !is_number(byte));
        let (digits, rest) = piece.split_at(end.unwrap_or(piece.len()));
        self.keep(digits);
        rest
    }

    fn number_ends(&mut self, paths: &UsagePaths, found: &mut UsageCounters) {
        let text = self.buffer.get(..usize::from(self.kept));
        if self.wanted
            && !self.unusable
            && let (Some(counter), Some(text)) = (self.counter(paths), text)
            && text.len() <= MAX_NUMBER_CHARS
        {
            found.record(counter, text, paths.scale());
        }
        self.value_ends(paths);
    }

    /// Stores a part of a wanted value. Stops storing once it is too long to match.
    fn keep(&mut self, part: &[u8]) {
        if !self.wanted || self.unusable {
            return;
        }
        let kept = usize::from(self.kept);
        match self.buffer.get_mut(kept..kept + part.len()) {
            Some(place) => {
                place.copy_from_slice(part);
                self.kept += part.len() as u8;
            }
            None => self.unusable = true,
        }
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

fn is_number(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E')
}

/// Finds the next quote or bracket: near ones byte by byte, far ones in blocks of 32 bytes, which
/// the compiler vectorises.
fn special(bytes: &[u8]) -> Option<usize> {
    const NEAR: usize = 16;
    // `{` and `[` differ in the same bit as `}` and `]`.
    let is_special = |byte: u8| byte == b'"' || byte | 0x20 == b'{' || byte | 0x20 == b'}';
    let near = bytes.get(..NEAR).unwrap_or(bytes);
    if let Some(at) = near.iter().position(|&byte| is_special(byte)) {
        return Some(at);
    }
    let far = bytes.get(NEAR..)?;
    let is_clean = |block: &&[u8]| {
        let specials = block
            .iter()
            .fold(false, |any, &byte| any | is_special(byte));
        !specials
    };
    let clean = NEAR + far.chunks_exact(32).take_while(is_clean).count() * 32;
    let mut rest = bytes.get(clean..)?.iter();
    rest.position(|&byte| is_special(byte)).map(|at| clean + at)
}
