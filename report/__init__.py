"Numbers become a table, a CSV file, a picture; no model is opened here."
