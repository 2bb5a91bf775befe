#!/bin/sh
# An ordinary script: it knows nothing of Ringfence. It turns drafts into notes and writes an index of them.
set -e
for draft in notes/drafts/*.md; do
    name=$(basename "$draft")
    { echo "# ${name%.md}"; echo; sort "$draft"; } > "notes/$name"
    rm "$draft"
done
{
    echo "# Notes"
    for note in notes/*.md; do echo "- [$(head -n 1 "$note" | cut -c 3-)]($note)"; done
} > INDEX.md
echo "$(ls notes/*.md | wc -l) notes"
