// Every way in which Go applications read a field: started by scripts/body-parsers.
package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path"
	"strings"
)

func main() {
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		field := path.Base(r.URL.Path)
		outer, inner, _ := strings.Cut(field, ".")
		raw, _ := io.ReadAll(r.Body)
		read := map[string]any{}
		again := func() *http.Request {
			copy := r.Clone(r.Context())
			copy.Body = io.NopCloser(bytes.NewReader(raw))
			return copy
		}
		one := again()
		one.ParseMultipartForm(1 << 20)
		read["PostForm"] = append(one.PostForm[field], one.PostForm[outer+"["+inner+"]"]...)
		read["FormValue"] = one.FormValue(field)
		if one.MultipartForm != nil {
			read["MultipartForm"] = one.MultipartForm.Value[field]
		}
		var plain map[string]any
		if json.NewDecoder(bytes.NewReader(raw)).Decode(&plain) == nil {
			nested, _ := plain[outer].(map[string]any)
			read["json.Decoder into a map"] = []any{plain[field], nested[inner]}
		}
		var whole struct {
			Username string
			UserName string `json:"user_name"`
			User     struct{ Name string }
		}
		if json.NewDecoder(bytes.NewReader(raw)).Decode(&whole) == nil {
			read["json.Decoder into a struct"] = map[string]string{"username": whole.Username, "user_name": whole.UserName, "user.name": whole.User.Name}[field]
		}
		if json.Unmarshal(raw, &whole) == nil {
			read["json.Unmarshal into a struct"] = map[string]string{"username": whole.Username, "user_name": whole.UserName, "user.name": whole.User.Name}[field]
		}
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(read)
	})
	if err := http.ListenAndServe("127.0.0.1:"+os.Args[1], nil); err != nil {
		panic(err)
	}
}
