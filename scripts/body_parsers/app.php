<?php
// Every way in which PHP applications read a field: started by scripts/body-parsers.
error_reporting(0);
$field = basename(parse_url($_SERVER['REQUEST_URI'], PHP_URL_PATH));
$raw = file_get_contents('php://input');
[$outer, $inner] = explode('.', $field . '.');
$in = function ($fields) use ($field, $outer, $inner) {
    if (!is_array($fields)) return null;
    return [$fields[$field] ?? null, $inner !== '' ? ($fields[$outer][$inner] ?? null) : null];
};
parse_str($raw, $parsed);
echo json_encode([
    '$_POST' => $in($_POST), '$_REQUEST' => $in($_REQUEST),
    'json_decode' => $in(json_decode($raw, true)), 'parse_str' => $in($parsed),
], JSON_INVALID_UTF8_SUBSTITUTE | JSON_PARTIAL_OUTPUT_ON_ERROR);
