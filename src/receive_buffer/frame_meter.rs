//! Finds the frames in the bytes of an HTTP/2 connection (RFC 9113 §4.1).

/// Bytes of the client preface, which precedes its first frame (RFC 9113 §3.4).
const PREFACE_BYTES: usize = 24;
const HEAD_BYTES: usize = 9;
/// PADDED flag: the payload begins with the length of its padding (RFC 9113 §6.1).
const PADDED: u8 = 8;

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHead {
    /// Payload length in bytes.
    pub length: u32,
    /// Padding bytes of a DATA frame.
    pub padding: u32,
    /// Frame type.
    pub kind: u8,
    /// Flags of this frame type.
    pub flags: u8,
    /// Its stream; 0 for the connection.
    pub stream: u32,
}

impl FrameHead {
    /// DATA.
    pub const DATA: u8 = 0;
    /// HEADERS.
    pub const HEADERS: u8 = 1;
    /// RST_STREAM.
    pub const RST_STREAM: u8 = 3;
    /// WINDOW_UPDATE.
    pub const WINDOW_UPDATE: u8 = 8;
    /// CONTINUATION.
    pub const CONTINUATION: u8 = 9;
    /// END_STREAM: the last frame of a stream in its direction.
    pub const END_STREAM: u8 = 1;

    /// Payload bytes that are not padding.
    pub fn content_bytes(&self) -> u32 {
        self.length.saturating_sub(self.padding)
    }

    /// Bytes of the whole frame on the wire.
    pub fn wire_bytes(&self) -> u64 {
        u64::from(self.length) + HEAD_BYTES as u64
    }
}

/// Parser position in the sequence of frames.
#[derive(Debug)]
pub(super) struct FrameMeter {
    /// Bytes to skip: the rest of the preface or of a payload.
    skip: usize,
    /// The frame header received so far, and the padding length that follows it.
    head: [u8; HEAD_BYTES + 1],
    head_bytes: usize,
}

impl FrameMeter {
    /// For the bytes of a client, which begin with the preface.
    pub(super) fn of_client() -> Self {
        Self {
            skip: PREFACE_BYTES,
            ..Self::of_server()
        }
    }

    /// For the bytes of a server.
    pub(super) fn of_server() -> Self {
        Self {
            skip: 0,
            head: [0; HEAD_BYTES + 1],
            head_bytes: 0,
        }
    }

    /// Whether `head` is a DATA frame with padding.
    fn is_padded(&self) -> bool {
        let [a, b, c, kind, flags, ..] = self.head;
        self.head_bytes >= HEAD_BYTES
            && kind == FrameHead::DATA
            && flags & PADDED != 0
            && [a, b, c] != [0; 3]
    }

    /// Consumes bytes that were read, and calls `show` for the header of each frame until it
    /// returns `false`. Returns how many bytes were consumed.
    pub(super) fn read(&mut self, read: &[u8], mut show: impl FnMut(&FrameHead) -> bool) -> usize {
        let mut bytes = read;
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            if bytes.is_empty() {
                return read.len();
            }
            let needed = HEAD_BYTES + usize::from(self.is_padded());
            let taken = (needed - self.head_bytes).min(bytes.len());
            self.head[self.head_bytes..][..taken].copy_from_slice(&bytes[..taken]);
            self.head_bytes += taken;
            bytes = &bytes[taken..];
            let is_padded = self.is_padded();
            if self.head_bytes < HEAD_BYTES + usize::from(is_padded) {
                if bytes.is_empty() {
                    return read.len();
                }
                continue;
            }
            self.head_bytes = 0;
            let [a, b, c, kind, flags, d, e, f, g, pad_length] = self.head;
            let length = u32::from_be_bytes([0, a, b, c]);
            self.skip = length as usize - usize::from(is_padded);
            let goes_on = show(&FrameHead {
                length,
                padding: if is_padded {
                    u32::from(pad_length) + 1
                } else {
                    0
                },
                kind,
                flags,
                // the first bit is reserved
                stream: u32::from_be_bytes([d & 0x7f, e, f, g]),
            });
            if !goes_on {
                return read.len() - bytes.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_found_however_their_bytes_are_cut() {
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        bytes.extend_from_slice(&[0, 0, 0, 4, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(&[0, 1, 4, 0, 1, 0, 0, 0, 1]);
        bytes.extend_from_slice(&[7; 260]);
        bytes.extend_from_slice(&[0, 0, 8, 6, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(&[7; 8]);
        // padded DATA, payload 5 bytes: the padding length (3), one byte of data, 3 of padding
        bytes.extend_from_slice(&[0, 0, 5, 0, 8, 0, 0, 0, 1, 3, 7, 0, 0, 0]);
        bytes.extend_from_slice(&[0, 0, 0, 0, 8, 0, 0, 0, 1]);
        bytes.extend_from_slice(&[0, 0, 1, 0, 9, 0, 0, 0, 1, 0]);
        let frame = |length, padding, kind, flags, stream| FrameHead {
            length,
            padding,
            kind,
            flags,
            stream,
        };
        let expected = [
            frame(0, 0, 4, 0, 0),
            frame(260, 0, 0, 1, 1),
            frame(8, 0, 6, 0, 0),
            frame(5, 4, 0, 8, 1),
            frame(0, 0, 0, 8, 1),
            frame(1, 1, 0, 9, 1),
        ];
        for size in [1, 2, 7, 9, 10, 24, 33, 300, 1000] {
            let (mut meter, mut seen) = (FrameMeter::of_client(), Vec::new());
            for part in bytes.chunks(size) {
                let consumed = meter.read(part, |head| {
                    seen.push(*head);
                    true
                });
                assert_eq!(consumed, part.len());
            }
            assert_eq!(seen, expected, "in parts of {size} bytes");
        }
        // stopped after every frame
        let (mut meter, mut seen) = (FrameMeter::of_client(), Vec::new());
        let mut left = &bytes[..];
        while !left.is_empty() {
            let consumed = meter.read(left, |head| {
                seen.push(*head);
                false
            });
            left = &left[consumed..];
        }
        assert_eq!(seen, expected);
    }
}
