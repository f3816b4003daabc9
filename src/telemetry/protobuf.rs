//! Protocol Buffers, as far as anybody here writes them: a field at a time behind the bytes of a message. Field numbers are below 16.

/// A field of wire type 0; zero is not written.
pub fn put_number(out: &mut Vec<u8>, field: u8, number: u64) {
    if number > 0 {
        put_choice(out, field, number);
    }
}

/// The same where zero says something, too: a member of a `oneof`.
pub fn put_choice(out: &mut Vec<u8>, field: u8, number: u64) {
    out.push(field << 3);
    put_varint(out, number);
}

/// A field of wire type 1.
pub fn put_fixed64(out: &mut Vec<u8>, field: u8, number: u64) {
    out.push(field << 3 | 1);
    out.extend_from_slice(&number.to_le_bytes());
}

/// A field of wire type 2: bytes, a text, a message.
pub fn put_bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    put_length(out, field, bytes.len());
    out.extend_from_slice(bytes);
}

/// What stands before the bytes of such a field.
pub fn put_length(out: &mut Vec<u8>, field: u8, length: usize) {
    out.push(field << 3 | 2);
    put_varint(out, length as u64);
}

fn put_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}
